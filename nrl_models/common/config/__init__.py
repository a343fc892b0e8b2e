"""What a configuration asks for, and whether code honours it."""
