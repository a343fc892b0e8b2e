"""Find parameters of rotary embeddings that contradict the configured length."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from transformers import PreTrainedConfig

EXTENDED = 1.5
"""Least ratio of the longest length and the original one at which the configuration states the extended length.

Qwen3's model card enables YaRN on top of the original `max_position_embeddings`, whose ratio is 1.25.
"""


LENGTHS = ("max_sequence_length", "max_seq_len", "seq_length", "model_max_length")
"""Other keys that published configurations have for the extended length."""


def impossible_rope(config: PreTrainedConfig) -> list[str]:
    """Return RoPE bases of 1 or less. Frequencies are its negative powers, which must decrease.

    Args:
        config: The text configuration.
    """
    bases = ((key, parameters.get("rope_theta")) for key, parameters in _rope_parameters(config))
    return [
        f"config.json {key}.rope_theta is {base:g}: expected more than 1"
        for key, base in bases
        if isinstance(base, int | float) and not base > 1
    ]


def contradicting_rope(config: PreTrainedConfig) -> list[str]:
    """Return YaRN factors that differ from the ratio of the longest length and the original one.

    Not compared:

    - Other kinds of RoPE, which define their factor in another way: Llama 3.1 has a ratio of 16 and a factor of 8.
    - Positions of images (`mrope_section`), which advance more slowly: Qwen3-VL's card has a ratio of 3.9, factor 3.
    - An extended length in another key, like `max_sequence_length` of Yarn-Mistral-7b-128k.

    Args:
        config: The text configuration.
    """
    longest = _positive(getattr(config, "max_position_embeddings", None))
    problems = []
    for key, parameters in _rope_parameters(config):
        factor = _positive(parameters.get("factor"))
        original = _positive(parameters.get("original_max_position_embeddings"))
        is_yarn = parameters.get("rope_type", parameters.get("type")) == "yarn"
        if not is_yarn or "mrope_section" in parameters or longest is None or factor is None or original is None:
            continue
        ratio = longest / original
        if ratio < EXTENDED or factor * original in [getattr(config, name, None) for name in LENGTHS]:
            continue
        if not math.isclose(ratio, factor, rel_tol=0.01):
            problems.append(
                f"config.json {key}.factor is {factor:g}, but max_position_embeddings {longest} / "
                f"original_max_position_embeddings {original} is {ratio:g}: set the factor to {ratio:g}, or "
                f"max_position_embeddings to {round(factor * original)}"
            )
    return problems


def _positive(value: object) -> float | None:
    """Return a positive number; None for other values."""
    return value if isinstance(value, int | float) and value > 0 else None


def _rope_parameters(config: PreTrainedConfig) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the parameters of all layers, or those of each kind of layer, with their key."""
    parameters = getattr(config, "rope_parameters", None)
    if not isinstance(parameters, Mapping):
        return
    nested = {kind: value for kind, value in parameters.items() if isinstance(value, Mapping)}
    if nested:
        yield from ((f"rope_parameters.{kind}", value) for kind, value in nested.items())
    else:
        yield "rope_parameters", parameters
