"""Qwen3-MoE: Qwen3's attention over a sparse mixture of stacked experts, with dense layers in between."""
