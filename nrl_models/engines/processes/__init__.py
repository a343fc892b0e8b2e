"""Engines in a subprocess that exchange JSON lines with it: MLX, Megatron-Core, and a vLLM of another environment."""
