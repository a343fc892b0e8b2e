"""Onboard an architecture: inspect a checkpoint, estimate its memory, and generate a family with fused linears."""
