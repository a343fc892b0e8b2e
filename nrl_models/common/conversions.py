"""transformers' conversions of a model's tensors, without compiling those of every model it knows.

transformers makes one table of the conversions of all models when the first is asked for, and compiles some 900 regular
expressions for it, most of which nobody uses: a tenth of a second of every process that loads a model. While the table
is made here, expressions are compiled when they are first used.
"""

from __future__ import annotations

import re
import threading
from typing import Any

from transformers import PreTrainedModel, conversion_mapping, core_model_loading

_making = threading.Lock()


def conversions_of(model: PreTrainedModel, *, add_legacy: bool = True) -> list[Any]:
    """transformers' conversions between the hub's layout and `model`'s: new objects, in the order of loading.

    Args:
        model: on any device.
        add_legacy: whether those are among them that only old checkpoints need.
    """
    _make_table()
    return conversion_mapping.get_model_conversion_mapping(model, add_legacy=add_legacy)


def are_alike(some: list[Any] | None, others: list[Any] | None) -> bool:
    """Whether two lists of conversions do the same, one after the other. None or no conversions are like nothing."""
    if not some or not others or len(some) != len(others):
        return False
    return all(_described(one) == _described(other) for one, other in zip(some, others, strict=True))


def _described(conversion: Any) -> tuple[Any, ...]:
    """A conversion's type and all that it was made of; not what it has seen."""
    operations = [(type(one), vars(one)) for one in getattr(conversion, "operations", ())]
    return (
        type(conversion),
        conversion._original_source_patterns,
        conversion._original_target_patterns,
        conversion.scope_prefix,
        conversion.base_model_prefix,
        getattr(conversion, "offset", None),
        operations,
    )


def _make_table() -> None:
    """Have transformers make its table, if it has not been made and is kept where it was in every version so far."""
    if getattr(conversion_mapping, "_checkpoint_conversion_mapping_cache", ()) is not None:
        return
    with _making:
        real, core_model_loading.re = core_model_loading.re, _Compiler()
        try:
            conversion_mapping.get_checkpoint_conversion_mapping("legacy")
        finally:
            core_model_loading.re = real


class _Compiler:
    """The module `re`, but what it compiles is compiled when it is first used."""

    def __getattr__(self, name: str) -> Any:
        return getattr(re, name)

    @staticmethod
    def compile(pattern: str, flags: int = 0) -> Deferred:
        """`re.compile`, later."""
        return Deferred(pattern, flags)


class Deferred:
    """A regular expression that is compiled when it is first used; a `re.Pattern` in all but its type.

    Args:
        pattern: the expression.
        flags: as `re.compile` takes them.
    """

    def __init__(self, pattern: str, flags: int = 0) -> None:
        self.pattern = pattern
        self._given = flags

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("pattern", "_given"):  # of an object that is being copied or unpickled
            raise AttributeError(name)
        compiled = re.compile(self.pattern, self._given)
        self.__dict__["search"] = compiled.search
        return getattr(compiled, name)

    def __copy__(self) -> Deferred:
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Deferred:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return re.compile, (self.pattern, self._given)

    def __repr__(self) -> str:
        return f"Deferred({self.pattern!r})"
