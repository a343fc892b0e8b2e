"""Prepares Hugging Face models for RL post-training and verifies that nothing changed."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# Public names by where they live. Imported on first use, so that `import nrl_models` needs no torch.
_PUBLIC = {
    "nrl_models.auto": (
        *("AutoModelForCausalLM", "AutoModelForImageTextToText"),
        *("AutoModelForSequenceClassification", "AutoModelForTokenClassification"),
    ),
    "nrl_models.common": (
        *("BackendConfig", "ModelFlag", "StateDictAdapter"),
        *("freeze", "freeze_unreachable", "trainable_parameters", "unreachable_parameters"),
    ),
    "nrl_models.errors": (
        *("CheckpointError", "ConfigurationError", "FamilyImportError", "NRLModelsError", "RegistrationError"),
        *("RemoteCodeError", "StateDictError", "UnknownArchitectureError", "UnknownArgumentError"),
    ),
    "nrl_models.registry": ("MODEL_ARCH_MAPPING", "register_architecture"),
}
_WHERE = {name: module for module, names in _PUBLIC.items() for name in names}

__all__ = ["__version__", *sorted(_WHERE)]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return __all__
