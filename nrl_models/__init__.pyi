from .auto import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForMultimodalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)
from .common.backend import BackendConfig
from .common.flags import ModelFlag
from .common.model_components.freezing import freeze, freeze_unreachable, trainable_parameters, unreachable_parameters
from .common.state_dict.adapter import StateDictAdapter
from .common.state_dict.merged import export_adapter
from .consistency.matrix import check_consistency
from .distributed import parallelize
from .engines import Sample, start_engine
from .errors import (
    CheckpointError,
    ConfigurationError,
    FamilyImportError,
    NRLModelsError,
    RegistrationError,
    RemoteCodeError,
    StateDictError,
    UnknownArchitectureError,
    UnknownArgumentError,
)
from .loading.mtp_layers.mtp_layer import MTPLayer
from .logprobs import Sampling, consistency_metrics, rollout_logprobs, token_logprobs
from .parity import check_parity
from .registry import MODEL_ARCH_MAPPING, register_architecture

__version__: str

__all__ = [
    "MODEL_ARCH_MAPPING",
    "AutoModel",
    "AutoModelForCausalLM",
    "AutoModelForImageTextToText",
    "AutoModelForMultimodalLM",
    "AutoModelForSequenceClassification",
    "AutoModelForTokenClassification",
    "BackendConfig",
    "CheckpointError",
    "ConfigurationError",
    "FamilyImportError",
    "MTPLayer",
    "ModelFlag",
    "NRLModelsError",
    "RegistrationError",
    "RemoteCodeError",
    "Sample",
    "Sampling",
    "StateDictAdapter",
    "StateDictError",
    "UnknownArchitectureError",
    "UnknownArgumentError",
    "__version__",
    "check_consistency",
    "check_parity",
    "consistency_metrics",
    "export_adapter",
    "freeze",
    "freeze_unreachable",
    "parallelize",
    "register_architecture",
    "rollout_logprobs",
    "start_engine",
    "token_logprobs",
    "trainable_parameters",
    "unreachable_parameters",
]
