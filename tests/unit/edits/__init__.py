"""The same edit, made to transformers' model and to ours of the same weights: outcomes must be equal.

Each file of edits is about one kind of edit; `test_same_edit.py` makes them all.
"""
