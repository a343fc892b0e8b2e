"""Sources of upstream packages, and what our code takes from them."""
