"""Checks of a new release of a package that nrl_models builds on, before users install it."""
