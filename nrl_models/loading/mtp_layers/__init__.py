"""Multi-token prediction: a trainable layer, and notes about weights that are dropped."""
