"""Check a new release of a dependency before users install it."""
