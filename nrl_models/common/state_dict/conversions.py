"""transformers' conversions of a model's tensors, without compiling those of every other model.

transformers makes one table of the conversions of all models when the first is requested, and compiles some 900 regular
expressions for it, most of which are never used: half the time of loading a small model. While the table is made here,
expressions are left uncompiled. transformers returns copies of its conversions, and those have compiled ones.
"""

from __future__ import annotations

import re
import threading
from types import SimpleNamespace
from typing import Any

from transformers import PreTrainedModel, conversion_mapping, core_model_loading

_making_the_table = threading.Lock()


def conversions_of(model: PreTrainedModel, *, add_legacy: bool = True) -> list[Any]:
    """transformers' conversions between the hub's layout and `model`'s: new objects, in the order of loading.

    Args:
        model: on any device.
        add_legacy: whether to include those that only old checkpoints need.
    """
    # The table has had this name in every version so far.
    if getattr(conversion_mapping, "_checkpoint_conversion_mapping_cache", ()) is None:
        with _making_the_table:
            core_model_loading.re = SimpleNamespace(**vars(re) | {"compile": Deferred})  # type: ignore[assignment]
            try:
                conversion_mapping.get_checkpoint_conversion_mapping("legacy")
            finally:
                core_model_loading.re = re
    return conversion_mapping.get_model_conversion_mapping(model, add_legacy=add_legacy)


class Deferred:
    """`re.compile(*arguments)`, evaluated when it is first used or copied: a copy is the compiled expression."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __getattr__(self, name: str) -> Any:
        return getattr(re.compile(*self.arguments), name)  # `re` caches what it compiled


def are_alike(some: list[Any] | None, others: list[Any] | None) -> bool:
    """Whether two lists of conversions do the same, one after the other; False if either is None or empty."""
    return bool(some and others and list(map(_described, some)) == list(map(_described, others)))


def _described(conversion: Any) -> tuple[Any, ...]:
    """A conversion's type and its settings, without its state."""
    operations = [(type(operation), vars(operation)) for operation in getattr(conversion, "operations", ())]
    return (
        type(conversion),
        conversion._original_source_patterns,
        conversion._original_target_patterns,
        conversion.scope_prefix,
        conversion.base_model_prefix,
        getattr(conversion, "offset", None),
        operations,
    )
