"""Families that only need a row: groups of linears with a common input, in files by kind of model."""

from nrl_models.families.table import (
    dense,
    encoders,
    hybrids,
    mixtures,
    multimodal,
    multimodal_mixtures,
    ocr,
    speech,
    towers,
)
from nrl_models.families.table.row import Row

__all__ = ["TABLE"]

_KINDS = (dense, encoders, hybrids, mixtures, multimodal, multimodal_mixtures, ocr, speech, towers)

TABLE: dict[str, Row] = dict(sorted(row for kind in _KINDS for row in kind.ROWS.items()))
"""Every row, by the name of its package in transformers."""
