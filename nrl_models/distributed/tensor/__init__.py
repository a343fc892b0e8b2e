"""Replacements of modules whose parameters are sharded over ranks."""
