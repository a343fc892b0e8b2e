"""Send new weights to a running vLLM through its interfaces: shared memory, deltas, and complete versions only."""
