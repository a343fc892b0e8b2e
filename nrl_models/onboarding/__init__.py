"""From a checkpoint to a family: what it is, what it needs, what its linears combine to."""
