"""Sources of upstream packages, and their use in our code."""
