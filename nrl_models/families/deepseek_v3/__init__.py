"""DeepSeek-V3 and R1: multi-head latent attention over a mixture of stacked and shared experts."""
