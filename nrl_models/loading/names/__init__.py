"""Map keys of a checkpoint to tensors of the model, or to parts that the model does not have."""
