"""The generated tests. Each takes a `family_case`, and runs for every registered class or those of `--nrl-family`.

The reference is always the Hugging Face class that a family extends, with the same weights, every 1-D parameter
randomised. fp32 must agree to 1e-5 and bf16 to 1e-2; copies and files must be exact.
"""
