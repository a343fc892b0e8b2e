"""A version of the weights by hub name, and an update that produces the next version.

Trainer and engine compute the next version with the same code, so both have identical bits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
import xxhash

from nrl_models.common.dtypes import dtype_name
from nrl_models.engines.digests import HEAD, tensor_digest
from nrl_models.engines.transfer.deltas import patched
from nrl_models.engines.transfer.segments import Segment
from nrl_models.errors import EngineError, itemised, shown

PROTOCOL = 2
"""Version of the message format between trainer and engine. Other versions raise an error."""


@dataclass(frozen=True)
class Update:
    """Description of an update: a delta if it has a base version, or else all weights.

    Args:
        version: Name of the version.
        digest: Digest of the weights after the update, see `Weights.digest`.
        segments: Locations of its tensors or changes.
        base: Name of the base version of a delta.
        base_digest: Digest of the base version.
    """

    version: str
    digest: str
    segments: tuple[Segment, ...]
    base: str = ""
    base_digest: str = ""

    def to_json(self) -> dict[str, Any]:
        """Convert the update to JSON types, without its tensors. `of_json` parses the result."""
        texts = {"version": self.version, "digest": self.digest, "base": self.base, "base_digest": self.base_digest}
        return {**texts, "segments": [segment.to_json() for segment in self.segments]}

    @staticmethod
    def of_json(value: Mapping[str, Any]) -> Update:
        """Parse the output of `to_json`.

        Raises:
            EngineError: If the value is not an update.
        """
        texts = ("version", "digest", "base", "base_digest")
        fits = (
            value.keys() == {*texts, "segments"}
            and all(isinstance(value[key], str) for key in texts)
            and isinstance(value["segments"], list)
            and (not value["base"] or bool(value["base_digest"]))
        )
        if not fits:
            raise EngineError(
                f"{shown(dict(value))} is not an update of weights: expected {', '.join(texts)} and segments, as sent "
                "by a trainer with this library"
            )
        segments = tuple(Segment.of_json(segment) for segment in value["segments"])
        return Update(segments=segments, **{key: value[key] for key in texts})


@dataclass(frozen=True)
class Weights:
    """All weights of one version.

    Args:
        version: Name of the version.
        tensors: Tensors by hub name. Empty if only digests are kept.
        digests: Digest of each tensor with dtype and shape, by hub name.
        specs: Dtype and shape of each tensor, by hub name.
    """

    version: str
    tensors: Mapping[str, torch.Tensor]
    digests: Mapping[str, str]
    specs: Mapping[str, tuple[torch.dtype, tuple[int, ...]]] = field(repr=False)

    @staticmethod
    def of(version: str, tensors: Mapping[str, torch.Tensor]) -> Weights:
        """Describe CPU tensors. The tensors are kept, not copied."""
        digests = {name: tensor_digest(tensor) for name, tensor in tensors.items()}
        specs = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
        return Weights(version, tensors, digests, specs)

    @cached_property
    def digest(self) -> str:
        """Digest of all names, dtypes, shapes and elements, in any order: 32 hexadecimal digits."""
        return digest_of(self.digests)

    @property
    def tied_heads(self) -> frozenset[str]:
        """Names of heads that equal another tensor: the embeddings."""
        counts = Counter(self.digests.values())
        heads = (name for name in self.digests if name.endswith(HEAD))
        return frozenset(name for name in heads if counts[self.digests[name]] > 1)

    def after(self, version: str, changed: Mapping[str, torch.Tensor]) -> Weights:
        """Return a new version with some tensors replaced."""
        digests = {name: tensor_digest(tensor) for name, tensor in changed.items()}
        return Weights(version, {**self.tensors, **changed}, {**self.digests, **digests}, self.specs)

    def without_tensors(self) -> Weights:
        """Return this version with its digests and specs only, without tensors."""
        return replace(self, tensors={})


def made_of(update: Update, last: Weights | None) -> tuple[Weights, frozenset[str]]:
    """Compute the version after an update, and the names of changed tensors.

    Args:
        update: The update. Its segments are read.
        last: The previous version, with tensors if the update is a delta; None if there is none.

    Raises:
        EngineError: If a segment cannot be read, the update has another base version or is damaged, or its tensors do
            not match the previous version. Lists all mismatched tensors.
    """
    if not update.base_digest:
        tensors: dict[str, torch.Tensor] = {}
        for segment in update.segments:
            tensors |= segment.read()[0]
        made = Weights.of(update.version, tensors)
        if last is not None:
            _require_same_tensors(made, last)
        changed = frozenset(tensors)
    else:
        if last is None or (last.version, last.digest) != (update.base, update.base_digest):
            there = f"version {last.version!r}, digest {last.digest}" if last else "no version it was sent"
            raise EngineError(
                f"the update to version {update.version!r} is made against version {update.base!r}, digest "
                f"{update.base_digest}, and the engine has {there}: send all weights"
            )
        if not last.tensors:
            raise EngineError(
                "this engine keeps no weights that a delta could change: it was started with deltas=False"
            )
        patched_tensors: dict[str, torch.Tensor] = {}
        for segment in update.segments:
            patched_tensors |= dict(patched(last.tensors, *segment.read()))
        made, changed = last.after(update.version, patched_tensors), frozenset(patched_tensors)
    if made.digest != update.digest:
        raise EngineError(
            f"version {update.version!r} arrived damaged: its digest is {made.digest}, and was {update.digest} where "
            "it was sent"
        )
    return made, changed


def digest_of(digests: Mapping[str, str]) -> str:
    """Combine the digests of all tensors into one of 32 hexadecimal digits. The order of the names does not matter."""
    digest = xxhash.xxh3_128()
    for name in sorted(digests):
        digest.update(f"{len(name)} {name} {digests[name]}\n".encode())
    return digest.hexdigest()


def _require_same_tensors(made: Weights, last: Weights) -> None:
    """Require that a version has the tensors of the one before: same names, dtypes and shapes.

    A head that equals the embeddings may be missing from either version, because an engine ties the two tensors.
    """
    problems = [f"{name} is missing" for name in last.specs.keys() - made.specs.keys() - last.tied_heads]
    problems += [f"{name} is not one of them" for name in made.specs.keys() - last.specs.keys() - made.tied_heads]
    problems.sort()
    problems += [
        f"{name} is {_spec(spec)}, and was {_spec(last.specs[name])}"
        for name, spec in made.specs.items()
        if last.specs.get(name, spec) != spec
    ]
    if problems:
        raise EngineError(
            f"version {made.version!r} has other tensors than version {last.version!r}, which the engine keeps:",
            *itemised(problems),
        )


def _spec(spec: tuple[torch.dtype, tuple[int, ...]]) -> str:
    return f"{dtype_name(spec[0])} {spec[1]}"
