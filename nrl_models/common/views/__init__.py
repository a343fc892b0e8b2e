"""Hugging Face tensors as views of parameters, traced from transformers' conversions."""
