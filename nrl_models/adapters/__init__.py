"""Integrations that pass this library's models and hub tensors to trainers: one module per trainer, imported on demand.

Each module uses its trainer's interface in the versions in `REQUIREMENT`, and raises an error for other versions.
"""
