"""Gemma 3n: later layers attend to earlier layers' keys and values."""
