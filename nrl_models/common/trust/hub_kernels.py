"""Kernels named in a configuration: transformers would download their code from the hub and run it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from nrl_models.errors import RemoteCodeError

_KEY = re.compile(r"\w*_implementation(_internal)?")


def refuse_hub_kernels(values: Mapping[str, Any], where: str) -> None:
    """Raise if a configuration's `attn_implementation` or a similar key is a repository: `someone/kernel`.

    Args:
        values: Contents of the configuration's file, including nested configurations.
        where: The file, for the message.

    Raises:
        RemoteCodeError: Lists every such key.
    """
    kernels = [f"{key}={value!r}" for key, value in _kernels(values)]
    if kernels:
        raise RemoteCodeError(
            f"{where} requests kernels of the hub, whose code would be downloaded and run: {', '.join(kernels)}. "
            "Remove them there, and pass attn_implementation= yourself; or, if you trust the code, "
            "trust_remote_code=True."
        )


def _kernels(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the keys that select a kernel, and their values, where a value is a repository."""
    waiting: list[tuple[str, Any, bool]] = [(key, value, False) for key, value in values.items()]
    while waiting:
        key, value, chooses = waiting.pop()
        chooses = chooses or _KEY.fullmatch(key.rpartition(".")[2]) is not None
        if isinstance(value, Mapping):
            waiting += [(f"{key}.{name}", inner, chooses) for name, inner in value.items()]
        elif isinstance(value, list):
            waiting += [(f"{key}[{number}]", inner, chooses) for number, inner in enumerate(value)]
        elif chooses and isinstance(value, str) and "/" in value:
            yield key, value
