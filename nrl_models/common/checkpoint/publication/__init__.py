"""Publish a directory in one step: staged files, locks, and syncing to disk."""
