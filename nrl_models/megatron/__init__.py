"""Megatron-Core as a second trainer: weights in its layout, and its GPT model for comparison (extra `megatron`).

- `ranks` converts a model's weights to the tensors of each Megatron rank, and back.
- `gpt_settings` converts a configuration to Megatron's arguments.
- `gpt_model` builds Megatron's model, and verifies on a small model that it computes the same.
- `trainer_parity` compares both models level by level.
"""
