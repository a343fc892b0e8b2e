"""What families are made of."""

from nrl_models.common.backend import BackendConfig
from nrl_models.common.family_model import FamilyModel
from nrl_models.common.flags import ModelFlag
from nrl_models.common.freezing import freeze, freeze_unreachable, trainable_parameters, unreachable_parameters
from nrl_models.common.projections import (
    CombinedGateUp,
    CombinedProjections,
    CombinedQKV,
    LinearGroup,
    combine,
    combine_groups,
)
from nrl_models.common.state_dict_adapter import StateDictAdapter

__all__ = [
    "BackendConfig",
    "CombinedGateUp",
    "CombinedProjections",
    "CombinedQKV",
    "FamilyModel",
    "LinearGroup",
    "ModelFlag",
    "StateDictAdapter",
    "combine",
    "combine_groups",
    "freeze",
    "freeze_unreachable",
    "trainable_parameters",
    "unreachable_parameters",
]
