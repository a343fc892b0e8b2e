"""Phi-3 and Phi-4: QKV and gate-up are combined on the hub already, so nothing is rewritten."""
