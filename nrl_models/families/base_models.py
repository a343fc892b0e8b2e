"""Base models: a family's layers without a head, created from transformers' class on first use.

`LlamaModel` is an attribute of this module: `hf.LlamaModel` with the layers that `LlamaForCausalLM` rewrites. Pickle
finds it here. Families declare nothing for it: the package follows from transformers' class, and the head from its
configuration.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import transformers
from transformers import PreTrainedModel

from nrl_models.common.upstream import classes_by_config
from nrl_models.families import folders, module_of
from nrl_models.families.table import TABLE
from nrl_models.family import FamilyModel


def is_served(name: str) -> bool:
    """Return True if `name` is a base model of transformers in a family's package."""
    upstream = getattr(transformers, name, None)
    return _is_base(upstream) and _head_for(upstream) is not None


def _is_base(candidate: Any) -> bool:
    """Return True for a model class without a head in any auto class."""
    if not (isinstance(candidate, type) and issubclass(candidate, PreTrainedModel)) or candidate.config_class is None:
        return False
    served = classes_by_config(transformers.AutoModel).get(candidate.config_class, None)
    return candidate in (served if isinstance(served, tuple | list) else (served,))


def _head_for(upstream: Any) -> type[FamilyModel] | None:
    """Return the class of a family that contains `upstream`, preferably with its configuration."""
    parts = upstream.__module__.split(".")
    package = parts[2] if parts[:2] == ["transformers", "models"] else ""
    if package in folders():
        names = folders()[package].architectures
    elif package in TABLE:
        names = TABLE[package].architectures
    else:
        return None
    module = import_module(module_of(package))
    # An older transformers may lack some of them.
    heads = [getattr(module, name) for name in names if hasattr(module, name)]
    return next((head for head in heads if head.config_class is upstream.config_class), heads[0] if heads else None)


def __getattr__(name: str) -> Any:
    upstream: Any = getattr(transformers, name, None)
    head = _head_for(upstream) if _is_base(upstream) else None
    if head is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return head.base_model_class(upstream, __name__)
