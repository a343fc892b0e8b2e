"""Checkpoint files: safetensors mapped, read, dequantised and written."""
