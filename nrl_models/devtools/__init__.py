"""Maintainers' tools: planted bugs, the configuration differential, coverage pages. Nothing imports this by default."""
