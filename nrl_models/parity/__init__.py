"""Check that a model equals transformers': weights, components, logits, gradients, and the first diverging module.

Follows the parity-testing guide of NeMo AutoModel. Level 1 compares weights, level 2 components, level 3 the complete
model; gradients follow. If a level fails, the first module that diverges is located.
"""

from nrl_models.deprecation import old_names
from nrl_models.parity.check import check_parity
from nrl_models.parity.compare import (
    StateDictComparison,
    TensorComparison,
    compare_state_dicts,
    compare_tensors,
)
from nrl_models.parity.levels import compare_components, compare_end_to_end, compare_gradients, compare_weights
from nrl_models.parity.localize import Culprit, localize
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
    "localize",
]

__getattr__ = old_names(__name__, {"localise": "localize"})  # codespell:ignore
