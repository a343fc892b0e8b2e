"""Resume checkpoints: weights, optimizer states and progress of a sharded training run."""
