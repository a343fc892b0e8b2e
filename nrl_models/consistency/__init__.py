"""Checks that training and inference agree: the matrix of checks, the verdict where they do not, and refits.

Follows NeMo RL's guide for new models: the same tokens are scored by the engine as it decodes, by the engine in one
prefill, and by the trainer, for each combination of length, data, sampling and batch size.
"""
