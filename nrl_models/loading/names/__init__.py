"""What the keys of a checkpoint stand for, in the model that is loaded or in parts that it does not have."""
