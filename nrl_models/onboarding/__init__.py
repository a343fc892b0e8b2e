"""Getting a model in: what a checkpoint is, and what is documented of every family."""
