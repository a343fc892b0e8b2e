"""A version of the weights by hub name, and an update that makes the next one of it.

Trainer and engine make the next version by the same code, so that both have the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum, auto
from functools import cached_property
from typing import Any

import torch
import xxhash

from nrl_models.common.dtypes import dtype_name
from nrl_models.engines.digests import hashed
from nrl_models.engines.transfer.deltas import patched
from nrl_models.engines.transfer.segments import Segment
from nrl_models.errors import EngineError, itemised, shown

PROTOCOL = 1
"""Of the messages between trainer and engine; another one is refused."""


class Kind(StrEnum):
    """What an update holds."""

    DENSE = auto()
    """All tensors."""
    DELTA = auto()
    """What changed since the version before."""


@dataclass(frozen=True)
class Update:
    """What the trainer tells an engine of an update; the tensors are in the segments.

    Args:
        kind: what is in the segments.
        version: its name.
        digest: of the weights as they are after it, see `Weights.digest`.
        segments: where its tensors are.
        base: the name of the version that a delta is made against.
        base_digest: its digest.
    """

    kind: Kind
    version: str
    digest: str
    segments: tuple[Segment, ...]
    base: str = ""
    base_digest: str = ""

    def to_json(self) -> dict[str, Any]:
        """For `of_json`."""
        texts = {"version": self.version, "digest": self.digest, "base": self.base, "base_digest": self.base_digest}
        return {"kind": str(self.kind), **texts, "segments": [segment.to_json() for segment in self.segments]}

    @staticmethod
    def of_json(value: Mapping[str, Any]) -> Update:
        """What `to_json` gave.

        Raises:
            EngineError: it is not that.
        """
        texts = ("kind", "version", "digest", "base", "base_digest")
        fits = value.keys() == {*texts, "segments"} and all(isinstance(value[key], str) for key in texts)
        if not fits or value["kind"] not in tuple(Kind) or not isinstance(value["segments"], list):
            raise EngineError(
                f"{shown(dict(value))} is no update of weights: expected {', '.join(texts)} and segments, with a kind "
                f"of {', '.join(Kind)}, as a trainer with this library sends it"
            )
        segments = tuple(Segment.of_json(segment) for segment in value["segments"])
        return Update(Kind(value["kind"]), segments=segments, **{key: value[key] for key in texts[1:]})


@dataclass(frozen=True)
class Weights:
    """All weights of one version.

    Args:
        version: its name.
        tensors: by hub name; without those that only their digests are kept of.
        digests: of each tensor, with dtype and shape, by hub name.
        specs: dtype and shape of each tensor, by hub name.
    """

    version: str
    tensors: Mapping[str, torch.Tensor]
    digests: Mapping[str, str]
    specs: Mapping[str, tuple[torch.dtype, tuple[int, ...]]] = field(repr=False)

    @staticmethod
    def of(version: str, tensors: Mapping[str, torch.Tensor]) -> Weights:
        """Those of tensors on the CPU, which are kept and not copied."""
        digests = {name: fast_digest(tensor) for name, tensor in tensors.items()}
        specs = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
        return Weights(version, tensors, digests, specs)

    @cached_property
    def digest(self) -> str:
        """Of all names, dtypes, shapes and elements, in whatever order: 32 hexadecimal digits."""
        return digest_of(self.digests)

    def after(self, version: str, changed: Mapping[str, torch.Tensor]) -> Weights:
        """The version that has other tensors in the place of some of these."""
        digests = {name: fast_digest(tensor) for name, tensor in changed.items()}
        return Weights(version, {**self.tensors, **changed}, {**self.digests, **digests}, self.specs)

    def without_tensors(self) -> Weights:
        """The same without the tensors themselves."""
        return replace(self, tensors={})


def made_of(update: Update, last: Weights | None) -> tuple[Weights, frozenset[str]]:
    """The version that an update makes, and the names of the tensors that it changes.

    Args:
        update: the update, whose segments are read.
        last: the version before, with its tensors if the update is a delta; None if there is none.

    Raises:
        EngineError: a segment cannot be read; the update is against another version or damaged; its tensors are not
            those of the version before. Lists all tensors that do not fit.
    """
    if update.kind is Kind.DENSE:
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
        found: dict[str, torch.Tensor] = {}
        for segment in update.segments:
            found |= dict(patched(last.tensors, *segment.read()))
        made, changed = last.after(update.version, found), frozenset(found)
    if made.digest != update.digest:
        raise EngineError(
            f"version {update.version!r} arrived damaged: its digest is {made.digest}, and was {update.digest} where "
            "it was sent"
        )
    return made, changed


def fast_digest(tensor: torch.Tensor) -> str:
    """The XXH3 (128 bits) of a tensor's dtype, shape and elements: finds what transport and software do to weights."""
    return hashed(tensor, xxhash.xxh3_128())


def digest_of(digests: Mapping[str, str]) -> str:
    """The digest of all tensors together."""
    digest = xxhash.xxh3_128()
    for name in sorted(digests):
        digest.update(f"{len(name)} {name} {digests[name]}\n".encode())
    return digest.hexdigest()


def _require_same_tensors(made: Weights, last: Weights) -> None:
    """Require that a version has the tensors of the one before: same names, dtypes and shapes."""
    problems = [f"{name} is missing" for name in last.specs if name not in made.specs]
    problems += [f"{name} is not one of them" for name in made.specs if name not in last.specs]
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
