"""Safetensors files: mapped, read, dequantised, written."""
