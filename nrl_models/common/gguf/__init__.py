"""Dequantize GGUF files on load."""
