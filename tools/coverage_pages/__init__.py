"""The model coverage pages, written from the recorded outcomes of every architecture."""
