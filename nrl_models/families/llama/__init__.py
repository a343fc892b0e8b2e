"""Llama: grouped-query attention and SwiGLU."""
