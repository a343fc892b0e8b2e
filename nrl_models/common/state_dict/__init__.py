"""Names and shapes of a model's tensors in other layouts, as views of its parameters."""
