"""ONNX nodes in torch: the table of their torch forms, and their gradients by torch's autograd."""
