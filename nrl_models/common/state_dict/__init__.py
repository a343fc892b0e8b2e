"""The names and shapes of a model's tensors elsewhere, as views of its parameters."""
