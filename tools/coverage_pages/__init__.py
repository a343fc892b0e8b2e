"""The model coverage pages, written from what is recorded of every architecture."""
