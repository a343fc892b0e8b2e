"""Gemma 4: dense, mixture of experts, and shared keys and values."""
