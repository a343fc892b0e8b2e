"""Model coverage pages, generated from the recorded outcomes of every architecture."""
