"""New weights for a running vLLM: vLLM's own interfaces for it, shared memory, deltas, and whole versions only."""
