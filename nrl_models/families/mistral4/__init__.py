"""Mistral 4: latent attention over a mixture of experts."""
