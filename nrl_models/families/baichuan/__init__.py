"""Baichuan: packed projections on the hub, rotary positions or ALiBi."""
