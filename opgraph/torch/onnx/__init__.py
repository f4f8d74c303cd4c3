"""ONNX models as trainable torch modules."""
