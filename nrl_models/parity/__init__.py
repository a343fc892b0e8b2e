"""Is it the same model? Comparison with transformers at three levels, gradients, and localisation.

Follows the parity-testing guide of NeMo AutoModel: level 1 compares weights, level 2 components,
level 3 the whole model; then gradients. What fails is traced to the first module that departs.
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
from nrl_models.parity.parity_report import ParityReport, ParityRow

__all__ = [
    "Culprit",
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
