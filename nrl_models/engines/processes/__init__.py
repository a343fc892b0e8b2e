"""Engines in a process of their own, which answer line by line: MLX, and the vLLM of another environment."""
