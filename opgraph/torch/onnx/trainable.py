"""Which initializers of a model are weights."""

from __future__ import annotations

from collections.abc import Callable, Collection

from opgraph.errors import InvalidArguments
from opgraph.ir import dtypes, opdef
from opgraph.ir.graph import Graph
from opgraph.ir.op import Op
from opgraph.onnx.source import Source
from opgraph.runtime.providers.torch_onnx.nodes import form_for, given_inputs

#: Names, or a function of a name that says whether it is trained.
Trainable = Collection[str] | Callable[[str], bool] | None


def trained(graph: Graph, trainable: Trainable = None) -> set[int]:
    """The ids of the initializers to train.

    By default these are the float ones that stand where a layer has its weights (`TorchForm.weights`), are multiplied
    as matrices, or meet a value that depends on a float input or on another weight in a pointwise op, and have at
    least one axis. So scales, slopes and biases are found, while epsilons, masks and tables of frequencies are not.

    Raises:
        InvalidArguments: a name that is no float initializer of the model.
    """
    source = graph.source
    assert isinstance(source, Source)
    names = source.value_of
    possible = {t.id for t in graph.constants if t.dtype in dtypes.FLOATS and names.get(t.id) in source.origin.tensors}
    if trainable is not None:
        return _chosen(possible, names, trainable)
    found: set[int] = set()
    flowing = {t.id for t in graph.inputs if t.dtype in dtypes.FLOATS}
    for op in graph.ops:
        found |= _weights(op, possible, flowing)
        if any(t.id in flowing or t.id in found for t in op.inputs):
            flowing |= {t.id for t in op.outputs if t.dtype in (*dtypes.FLOATS, dtypes.UNDEF)}
    return found


def _weights(op: Op, possible: Collection[int], flowing: Collection[int]) -> set[int]:
    record = opdef.find(op.kind)
    form = form_for(op) if op.kind == "Wildcard" else None
    if form is not None:
        places = given_inputs(op)
        wanted = [places[i] for i in form.weights if i < len(places)]
        ids = {op.inputs[i].id for i in wanted if i is not None}
    elif record is not None and record.family == "linear":
        ids = {t.id for t in op.inputs}
    elif record is not None and record.is_pointwise and any(t.id in flowing for t in op.inputs):
        ids = {t.id for t in op.inputs if t.ndim}
    else:
        ids = set()
    return ids & set(possible) if ids else ids


def _chosen(possible: Collection[int], names: dict[int, str], trainable: Trainable) -> set[int]:
    if callable(trainable):
        return {i for i in possible if trainable(names[i])}
    wanted = {trainable} if isinstance(trainable, str) else set(trainable or ())
    unknown = sorted(wanted - {names[i] for i in possible})
    if unknown:
        raise InvalidArguments(
            f"{unknown[0]!r} is no float initializer that the model uses",
            where="from_onnx, trainable",
            fix="name initializers of the model; `module.onnx_names` lists them",
        )
    return {i for i in possible if names[i] in wanted}
