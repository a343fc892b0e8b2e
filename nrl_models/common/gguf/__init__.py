"""GGUF files, read as the plain weights they stand for."""
