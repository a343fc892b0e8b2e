"""Make the same edit to transformers' model and to ours with the same weights. The outcomes must be equal.

Each file contains one kind of edit. `test_same_edit.py` runs them all.
"""
