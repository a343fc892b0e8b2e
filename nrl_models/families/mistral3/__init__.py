"""Mistral 3: a Pixtral vision tower before Mistral."""
