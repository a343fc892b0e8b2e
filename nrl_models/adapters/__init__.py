"""Hooks that give trainers our models and the hub's tensors: one module a trainer, none imported unless asked for.

Each is written against the trainer's own interface in the versions that its `REQUIREMENT` names, and refuses others.
"""
