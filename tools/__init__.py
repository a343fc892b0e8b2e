"""Repository maintenance; not part of the wheel."""
