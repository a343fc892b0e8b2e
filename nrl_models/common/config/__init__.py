"""Check that the model's code supports every setting of a configuration."""
