"""Megatron-Core as a second trainer: weights in its layout, and its GPT model beside ours (extra `megatron`).

`ranks` gives what each of Megatron's ranks holds, and reads it back. `gpt_settings` says in Megatron's words what a
configuration says, `gpt_model` builds its model and proves on a small one that it computes the same. `trainer_parity`
compares the two level by level.
"""
