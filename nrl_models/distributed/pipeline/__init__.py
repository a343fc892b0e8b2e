"""Pipelines: a model's layers as stages on the ranks of `pp`, run by torch's schedules."""
