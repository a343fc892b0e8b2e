"""Gemma 3: q/k norms, five sliding-window layers to each full one; text alone or with a SigLIP vision tower."""
