"""Nemotron-H: Mamba-2, attention and MLPs or experts."""
