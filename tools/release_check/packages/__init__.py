"""Packages that are judged: versions on the index, and environments with them."""
