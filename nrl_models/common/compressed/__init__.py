"""Dequantize compressed-tensors checkpoints on load."""
