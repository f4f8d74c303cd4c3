"""ONNX models as torch modules that train."""
