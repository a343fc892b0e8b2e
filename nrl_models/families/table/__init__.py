"""Families that need nothing but their groups named: `table` names them, `model` makes their classes."""
