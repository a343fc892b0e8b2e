"""Inputs to run a model on: real text, random tokens, images, audio."""
