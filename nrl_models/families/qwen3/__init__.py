"""Qwen3: Llama's layers with RMS-normed queries and keys."""
