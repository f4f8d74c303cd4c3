"""`torch.compile(model, backend="opgraph")`, found by name through the entry point `torch_dynamo_backends`."""

from opgraph.torch.graph.backend import backend as backend
from opgraph.torch.graph.backend import prepare_dynamo

prepare_dynamo()
