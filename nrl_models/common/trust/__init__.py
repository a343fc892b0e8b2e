"""Checks of untrusted resources: servers and their keys, links out of a directory, directories of other programs."""
