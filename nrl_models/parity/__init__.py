"""Checks that a model equals transformers': three levels, gradients, and the module at fault.

Follows the parity-testing guide of NeMo AutoModel: level 1 compares weights, level 2 components, level 3 the whole
model; then gradients. A failure is traced to the first module that diverges.
"""

from nrl_models.parity.check import check_parity
from nrl_models.parity.compare import (
    StateDictComparison,
    TensorComparison,
    compare_state_dicts,
    compare_tensors,
)
from nrl_models.parity.levels import compare_components, compare_end_to_end, compare_gradients, compare_weights
from nrl_models.parity.localise import Culprit, localise
from nrl_models.parity.parity_report import Level, ParityReport, ParityRow

__all__ = [
    "Culprit",
    "Level",
    "ParityReport",
    "ParityRow",
    "StateDictComparison",
    "TensorComparison",
    "check_parity",
    "compare_components",
    "compare_end_to_end",
    "compare_gradients",
    "compare_state_dicts",
    "compare_tensors",
    "compare_weights",
    "localise",
]
