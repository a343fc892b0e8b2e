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
from .common.freezing import freeze, freeze_unreachable, trainable_parameters, unreachable_parameters
from .common.state_dict.adapter import StateDictAdapter
from .common.state_dict.merged import export_adapter
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
from .loading.mtp_layer import MTPLayer
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
    "StateDictAdapter",
    "StateDictError",
    "UnknownArchitectureError",
    "UnknownArgumentError",
    "__version__",
    "export_adapter",
    "freeze",
    "freeze_unreachable",
    "register_architecture",
    "trainable_parameters",
    "unreachable_parameters",
]
