"""Engines in a process of their own, which answer line by line: MLX, Megatron-Core, and another vLLM."""
