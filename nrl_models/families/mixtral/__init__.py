"""Mixtral: Llama's attention over a sparse mixture of stacked experts."""
