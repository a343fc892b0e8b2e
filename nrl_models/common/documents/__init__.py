"""Packed documents: several sequences in one row, which a model must keep apart."""
