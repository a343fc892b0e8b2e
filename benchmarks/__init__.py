"""Benchmarks. Each prints ratios to a baseline or a limit measured in the same run."""
