"""Find the weights of multi-token prediction (MTP) in a checkpoint.

MTP layers follow the last decoder layer and predict tokens after the next one (DeepSeek-V3,
https://arxiv.org/abs/2412.19437, section 2.2). Engines use them as draft model in speculative decoding. transformers'
models ignore them: `_keys_to_ignore_on_load_unexpected` has patterns of their published names. This module reads these
patterns and makes them strict. There are two forms of names:

- A separate prefix: `mtp.layers.0`, `model.mtp_block.0`.
- Numbers after the decoder's layers: `model.layers.61` in a model of 61 layers. Such a layer only counts as MTP if it
  has `eh_proj`, which combines embedding and hidden state, and if the configuration declares its number. So a surplus
  decoder layer is not mistaken for one.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

from transformers import PreTrainedModel

from nrl_models.common.flags import MTPForm
from nrl_models.errors import Problem, ProblemKind

MTP = Literal["keep", "drop"]
"""Whether a checkpoint's MTP weights stay with the model and are saved and exported with it."""

CHOICES: tuple[MTP, ...] = get_args(MTP)

COUNTS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers", "num_mtp_modules")
"""Config keys of the number of MTP layers."""

JOINT = "eh_proj.weight"
"""The projection at the start of every MTP layer that is numbered like a decoder layer."""

MTP_COPIES = ("embed_tokens.weight", "shared_head.head.weight")
"""Ends of the names of an MTP layer's copies of the model's embeddings."""

_NUMBERED = re.compile(r"(?P<layers>.*layers\\\.)\d+(\\\.)?(\.\*)?")
"""Form of transformers' patterns for a complete layer with a fixed number, from one published model."""


@dataclass(frozen=True, slots=True)
class MTPParts:
    """Module names of the trainable parts of an MTP layer in a checkpoint.

    Args:
        layer: Prefix of the decoder layer's tensors.
        embedding_norm, hidden_norm: Norms of the inputs of `joint`.
        joint: Projection of the concatenation of embedding and hidden state.
        norm: Norm after the layer.
        input, output: Copies of the model's embeddings; empty if there are none.
    """

    layer: str
    embedding_norm: str
    hidden_norm: str
    joint: str
    norm: str
    input: str = ""
    output: str = ""

    @classmethod
    def of(cls, form: MTPForm, number: int) -> MTPParts:
        """Return the names for a layer.

        Args:
            form: Form of its names.
            number: Number of the first layer after the decoder.
        """
        if form is MTPForm.PREFIXED:
            before = "mtp.pre_fc_norm_"
            return cls("mtp.layers.0.", f"{before}embedding", f"{before}hidden", "mtp.fc", "mtp.norm")
        layer = f"model.layers.{number}."
        names = ("enorm", "hnorm", "eh_proj", "shared_head.norm", "embed_tokens", "shared_head.head")
        return cls(layer, *(layer + name for name in names))

    @property
    def others(self) -> list[str]:
        """All names except the decoder layer."""
        parts = (self.embedding_norm, self.hidden_norm, self.joint, self.norm, self.input, self.output)
        return [part for part in parts if part]


class MTPNames:
    """Names of MTP weights in a model's checkpoints.

    Args:
        model: The model. Its configuration has the number of layers, and its classes have the patterns of names.

    Attributes:
        first: Number of the first layer after the decoder; -1 if the configuration has no number of layers.
        announced: Number of MTP layers in the configuration.
        key: Key of that number.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        text: Any = model.config.get_text_config(decoder=True)
        self.first: int = _count(text, "num_hidden_layers") or -1
        self.key = next((key for key in COUNTS if _count(text, key)), "")
        self.announced = _count(text, self.key) if self.key else 0

    @cached_property
    def prefixed(self) -> list[tuple[str, re.Pattern[str]]]:
        """Patterns of MTP weights with a separate prefix, each with the name of the model that contains them."""
        return [(inside, re.compile(pattern)) for inside, pattern in self._upstream if "mtp" in pattern]

    @cached_property
    def numbered(self) -> list[tuple[str, re.Pattern[str]]]:
        """Patterns of MTP weights with numbers after the decoder's, each with the name of the containing model."""
        if self.first < 0:
            return []
        matches = [(inside, _NUMBERED.fullmatch(pattern)) for inside, pattern in self._upstream if "mtp" not in pattern]
        return [(inside, re.compile(rf"{match['layers']}(?P<number>\d+)\.")) for inside, match in matches if match]

    @cached_property
    def _upstream(self) -> list[tuple[str, str]]:
        """transformers' patterns of MTP weights: the model's, or those of its submodels, each with its name."""
        for name, module in self._model.named_modules():
            if isinstance(module, PreTrainedModel):
                patterns = dict.fromkeys(module._keys_to_ignore_on_load_unexpected or ())
                if mtp_patterns := [
                    (f"{name}." if name else "", pattern) for pattern in patterns if self.is_pattern(pattern)
                ]:
                    return mtp_patterns
        return []

    @property
    def known(self) -> bool:
        """Whether checkpoints of this model may have MTP weights."""
        return bool(self.prefixed or self.numbered)

    def may_be(self, key: str) -> bool:
        """Return True if an unknown tensor may be an MTP weight according to its name."""
        return self._has_prefix(key) or self._number(key) is not None

    @staticmethod
    def is_pattern(pattern: str) -> bool:
        """Return True if one of transformers' patterns is for MTP weights."""
        return "mtp" in pattern or _NUMBERED.fullmatch(pattern) is not None

    def among(self, unknown: Collection[str]) -> list[str]:
        """Return the MTP weights among `unknown`, the keys of a checkpoint that the model does not have."""
        joints = {self._number(key) for key in unknown if key.endswith(f".{JOINT}")}
        return [key for key in unknown if self._has_prefix(key) or (self._number(key) or -1) in joints]

    def incomplete(self, keys: Collection[str]) -> list[Problem]:
        """Return a problem if a checkpoint has some but not all of the MTP layers in the configuration."""
        numbers = {int(match[1]) for key in keys if (match := re.search(r"\.(\d+)\.", key))}
        if not numbers or len(numbers) >= self.announced:
            return []
        there = ", ".join(map(str, sorted(numbers)))
        detail = f"declares {self.announced} MTP layers, and the checkpoint has number {there} only"
        return [Problem(ProblemKind.PARTIAL, self.key, detail)]

    def _has_prefix(self, key: str) -> bool:
        return any(pattern.search(key.removeprefix(inside)) for inside, pattern in self.prefixed)

    def _number(self, key: str) -> int | None:
        """Return the number of the MTP layer that `key` belongs to; None if it is not numbered like a decoder layer."""
        for inside, pattern in self.numbered:
            match = pattern.search(key.removeprefix(inside))
            if match and 0 <= int(match["number"]) - self.first < max(self.announced, 1):
                return int(match["number"])
        return None


def _count(config: Any, key: str) -> int:
    value = getattr(config, key, None)
    return value if type(value) is int and value > 0 else 0
