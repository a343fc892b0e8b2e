"""Qwen2 and Qwen2.5: Llama's layers with biases on Q, K and V."""
