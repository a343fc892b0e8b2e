"""Prepares Hugging Face models for RL post-training and verifies that nothing changed."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# Public names and where they live. Imported on first use, so that `import nrl_models` needs no torch.
_WHERE = {
    "AutoModelForCausalLM": "nrl_models.auto",
    "AutoModelForImageTextToText": "nrl_models.auto",
    "AutoModelForSequenceClassification": "nrl_models.auto",
    "AutoModelForTokenClassification": "nrl_models.auto",
    "BackendConfig": "nrl_models.common",
    "CheckpointError": "nrl_models.errors",
    "ConfigurationError": "nrl_models.errors",
    "FamilyImportError": "nrl_models.errors",
    "ModelFlag": "nrl_models.common",
    "NRLModelsError": "nrl_models.errors",
    "RegistrationError": "nrl_models.errors",
    "RemoteCodeError": "nrl_models.errors",
    "StateDictAdapter": "nrl_models.common",
    "StateDictError": "nrl_models.errors",
    "UnknownArchitectureError": "nrl_models.errors",
    "UnknownArgumentError": "nrl_models.errors",
    "MODEL_ARCH_MAPPING": "nrl_models.registry",
    "register_architecture": "nrl_models.registry",
    "freeze": "nrl_models.common",
    "freeze_unreachable": "nrl_models.common",
    "trainable_parameters": "nrl_models.common",
    "unreachable_parameters": "nrl_models.common",
}

__all__ = ["__version__", *sorted(_WHERE)]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return __all__
