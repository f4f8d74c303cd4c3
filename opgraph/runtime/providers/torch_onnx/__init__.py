"""ONNX nodes in torch: the table of their meanings, and their gradients by torch's autograd."""
