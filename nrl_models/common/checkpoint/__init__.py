"""Checkpoint files: safetensors mapped, read, dequantized and written."""
