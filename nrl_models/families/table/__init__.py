"""Families that only need a row: groups of linears with a common input, in files by kind of model."""

from nrl_models.families.table import dense, encoders, hybrids, mixtures, multimodal, speech
from nrl_models.families.table.row import Row

__all__ = ["TABLE"]

TABLE: dict[str, Row] = dict(
    sorted((dense.ROWS | mixtures.ROWS | hybrids.ROWS | multimodal.ROWS | speech.ROWS | encoders.ROWS).items())
)
"""Every row, by the name of its package in transformers."""
