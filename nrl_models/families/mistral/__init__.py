"""Mistral: Llama's layers with sliding-window attention."""
