"""Compare our classes with transformers' own, in cheap checks."""
