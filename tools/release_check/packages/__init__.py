"""The packages that are checked: versions on the index, and environments for them."""
