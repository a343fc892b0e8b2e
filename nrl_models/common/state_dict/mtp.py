"""Weights of multi-token prediction (MTP): which tensors of a checkpoint they are.

MTP layers follow the last decoder layer and predict words after the next (DeepSeek-V3,
https://arxiv.org/abs/2412.19437, section 2.2). Engines draft with them in speculative decoding. transformers' models
do not compute with them and drop them: `_keys_to_ignore_on_load_unexpected` says under which names published
checkpoints have them. That is read here, and made strict. Some have a prefix of their own (`mtp.layers.0`,
`model.mtp_block.0`). Others are numbered on after the decoder's layers (`model.layers.61` of 61): these are known by
`eh_proj`, which joins embedding and hidden state, so that a decoder layer too many is never taken for one,
and by the number that the configuration announces.
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
"""What becomes of a checkpoint's MTP weights: they stay with the model, and are saved and exported with it; or not."""

CHOICES: tuple[MTP, ...] = get_args(MTP)

COUNTS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers", "num_mtp_modules")
"""What configurations call the number of MTP layers."""

JOINT = "eh_proj.weight"
"""The projection that every MTP layer begins with that is numbered like a decoder layer."""

_NUMBERED = re.compile(r"(?P<layers>.*layers\\\.)\d+(\\\.)?(\.\*)?")
"""transformers' pattern of a whole layer of some number: that of one published model."""


@dataclass(frozen=True, slots=True)
class MTPParts:
    """Where a checkpoint has the parts of an MTP layer that can be trained, by the names of modules.

    Args:
        layer: the beginning of the names of the decoder layer's tensors.
        embedding_norm, hidden_norm: the norms of what is joined.
        joint: the projection that joins embedding and hidden state, in this order.
        norm: the norm after the layer.
        input, output: copies of the model's own embeddings; empty if there are none.
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
        """The parts of a layer.

        Args:
            form: how it is made.
            number: of the layer after the decoder's last.
        """
        if form is MTPForm.PREFIXED:
            before = "mtp.pre_fc_norm_"
            return cls("mtp.layers.0.", f"{before}embedding", f"{before}hidden", "mtp.fc", "mtp.norm")
        layer = f"model.layers.{number}."
        own = ("enorm", "hnorm", "eh_proj", "shared_head.norm", "embed_tokens", "shared_head.head")
        return cls(layer, *(layer + name for name in own))

    @property
    def others(self) -> list[str]:
        """All but the decoder layer."""
        parts = (self.embedding_norm, self.hidden_norm, self.joint, self.norm, self.input, self.output)
        return [part for part in parts if part]


class MTPNames:
    """The names that MTP weights of a model's checkpoints have.

    Args:
        model: the model; its configuration says how many layers there are, its classes' patterns what they are called.

    Attributes:
        first: the number of the layer after the decoder's last; -1 where the configuration does not say.
        announced: how many MTP layers the configuration announces.
        key: by which key.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        text: Any = model.config.get_text_config(decoder=True)
        self.first: int = _count(text, "num_hidden_layers") or -1
        self.key = next((key for key in COUNTS if _count(text, key)), "")
        self.announced = _count(text, self.key) if self.key else 0

    @cached_property
    def prefixed(self) -> list[tuple[str, re.Pattern[str]]]:
        """Patterns of MTP weights with a prefix of their own, each with the name of the model that they are in."""
        return [(inside, re.compile(pattern)) for inside, pattern in self._upstream if "mtp" in pattern]

    @cached_property
    def numbered(self) -> list[tuple[str, re.Pattern[str]]]:
        """Patterns of MTP weights that are numbered on, likewise."""
        if self.first < 0:
            return []
        found = [(inside, _NUMBERED.fullmatch(pattern)) for inside, pattern in self._upstream if "mtp" not in pattern]
        return [(inside, re.compile(rf"{match['layers']}(?P<number>\d+)\.")) for inside, match in found if match]

    @cached_property
    def _upstream(self) -> list[tuple[str, str]]:
        """transformers' patterns of MTP weights: the model's, or else those of the models in it, each with its name."""
        for name, module in self._model.named_modules():
            if isinstance(module, PreTrainedModel):
                patterns = dict.fromkeys(module._keys_to_ignore_on_load_unexpected or ())
                if found := [(f"{name}." if name else "", pattern) for pattern in patterns if self.is_pattern(pattern)]:
                    return found
        return []

    @property
    def known(self) -> bool:
        """Whether checkpoints of this model may have MTP weights."""
        return bool(self.prefixed or self.numbered)

    def may_be(self, key: str) -> bool:
        """Whether a tensor that the model does not have may be an MTP weight, by its name alone."""
        return self._has_prefix(key) or self._number(key) is not None

    @staticmethod
    def is_pattern(pattern: str) -> bool:
        """Whether one of transformers' patterns is of MTP weights."""
        return "mtp" in pattern or _NUMBERED.fullmatch(pattern) is not None

    def among(self, unknown: Collection[str]) -> list[str]:
        """The MTP weights among the keys of a checkpoint that the model does not have."""
        joints = {self._number(key) for key in unknown if key.endswith(f".{JOINT}")}
        return [key for key in unknown if self._has_prefix(key) or (self._number(key) or -1) in joints]

    def incomplete(self, found: Collection[str]) -> list[Problem]:
        """Problems for MTP layers that the configuration announces and of which a checkpoint has only some."""
        numbers = {int(match[1]) for key in found if (match := re.search(r"\.(\d+)\.", key))}
        if not numbers or len(numbers) >= self.announced:
            return []
        there = ", ".join(map(str, sorted(numbers)))
        detail = f"announces {self.announced} MTP layers, and the checkpoint has number {there} only"
        return [Problem(ProblemKind.PARTIAL, self.key, detail)]

    def _has_prefix(self, key: str) -> bool:
        return any(pattern.search(key.removeprefix(inside)) for inside, pattern in self.prefixed)

    def _number(self, key: str) -> int | None:
        """The number of the layer after the decoder's that `key` is of."""
        for inside, pattern in self.numbered:
            match = pattern.search(key.removeprefix(inside))
            if match and 0 <= int(match["number"]) - self.first < max(self.announced, 1):
                return int(match["number"])
        return None


def _count(config: Any, key: str) -> int:
    value = getattr(config, key, None)
    return value if type(value) is int and value > 0 else 0
