"""The generated tests. Each takes a `family_case`, and runs for all registered classes or those of `--nrl-family`.

The reference is the Hugging Face class that a family extends, with the same weights, and all 1-D parameters randomized.
The tolerance is 1e-5 in fp32 and 1e-2 in bf16. Copies and files must be exact.
"""
