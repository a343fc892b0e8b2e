"""Gemma 2: soft-capped logits, norms before and after each block, alternating sliding windows."""
