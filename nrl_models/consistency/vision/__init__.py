"""Consistency on prompts with images."""
