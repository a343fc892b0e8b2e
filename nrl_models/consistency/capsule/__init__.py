"""Capsules: one file with the evidence of a verdict, from which `nrl-models replay` computes the verdict again."""
