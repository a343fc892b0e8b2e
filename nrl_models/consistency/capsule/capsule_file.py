"""The file of a capsule: one safetensors file whose metadata has a JSON object. It never contains a pickle."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open

from nrl_models import __version__
from nrl_models.common.checkpoint.json_reading import parse_object
from nrl_models.common.checkpoint.writing import write_whole
from nrl_models.common.value_checks import is_integer, is_number
from nrl_models.consistency.capsule.redaction import redacted
from nrl_models.engines.digests import tensor_digest
from nrl_models.errors import CapsuleError, CheckpointError, NRLModelsError, one_line

FORMAT = 2
"""Version of the file format. Increased whenever older capsules can no longer be read."""

MEGABYTE = 1_000_000

NAME = "nrl_models capsule"


class CapsuleKind(StrEnum):
    """Check that wrote a capsule."""

    CONSISTENCY = "consistency"
    WATCH = "watch"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits on the contents of a capsule.

    Args:
        megabytes: Maximum size of the tensors in MB. Log-probabilities are always kept. Weights and activations of the
            first diverging block come next, then activations of the other blocks.
        tokens: Maximum length of sequences whose activations are kept.
    """

    megabytes: float = 16.0
    tokens: int = 1024

    def __post_init__(self) -> None:
        is_size = is_number(self.megabytes, 0.0, math.inf) and self.megabytes > 0
        problems = [] if is_size else [f"megabytes={self.megabytes}: expected more than 0"]
        problems += [] if is_integer(self.tokens, 1) else [f"tokens={self.tokens}: expected at least 1"]
        if problems:
            raise CapsuleError("cannot write such a capsule:", *problems)


class Contents:
    """Contents of a capsule.

    Args:
        kind: The check that writes the capsule.
        limits: Limits that apply while it is filled.

    Attributes:
        values: A JSON object.
        tensors: Tensors by name.
        left_out: Descriptions of tensors that did not fit.
    """

    def __init__(self, kind: CapsuleKind, limits: Limits | None = None) -> None:
        self.kind, self.limits = kind, limits or Limits()
        self.values: dict[str, Any] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        self.left_out: list[str] = []
        self._names: dict[str, str] = {}
        """The first name of each distinct tensor, by digest."""
        self._stored: dict[str, torch.Tensor] = {}
        self._aliases: dict[str, str] = {}

    @property
    def nbytes(self) -> int:
        """Size of all tensors; equal ones count once."""
        return sum(tensor.nbytes for tensor in self._stored.values())

    def add(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Add tensors of any size."""
        self._add(tensors, _stored_forms(tensors))

    def _add(self, tensors: Mapping[str, torch.Tensor], forms: Mapping[str, tuple[str, torch.Tensor]]) -> None:
        for name, (key, tensor) in forms.items():
            if key in self._names:
                self._aliases[name] = self._names[key]
            else:
                self._names[key], self._stored[name] = name, tensor
            self.tensors[name] = tensors[name]

    def offer(self, description: str, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Add tensors if all of them fit, else note that they are left out.

        Args:
            description: Description of the tensors.
            tensors: Tensors by name.
        """
        most = self.limits.megabytes * MEGABYTE
        raw = sum(tensor.nbytes for tensor in tensors.values())
        if raw / 2 > most and len(tensors) == 1:  # too large even as bf16
            self.left_out.append(f"{description} ({raw / MEGABYTE:.1f} MB)")
            return False
        forms = _stored_forms(tensors)
        new = {key: each.nbytes for key, each in forms.values() if key not in self._names}
        size = sum(new.values())
        if self.nbytes + size > most:
            self.left_out.append(f"{description} ({size / MEGABYTE:.1f} MB)")
            return False
        self._add(tensors, forms)
        return True

    def write(self, file: Path) -> None:
        """Write the file. Addresses, paths and secrets are removed from `values`.

        Raises:
            SaveError: If the disk is full or read-only.
        """
        content = {
            "kind": self.kind,
            "values": redacted(json_values(self.values)),
            "left_out": self.left_out,
            "aliases": self._aliases,
            "widened": [name for name, each in self._stored.items() if each.dtype != self.tensors[name].dtype],
        }
        text = json.dumps(content, allow_nan=False)
        metadata = {
            "name": NAME,
            "format": str(FORMAT),
            "written_by": __version__,
            "content": text,
            "digest": _digest(text, self._stored),
        }
        stored = {name: each.contiguous().clone() for name, each in self._stored.items()}
        write_whole(file, safetensors.torch.save(stored, metadata))

    @classmethod
    def read(cls, file: Path) -> Contents:
        """Read a capsule.

        Raises:
            CapsuleError: If the file is not a capsule, is damaged, or has another format version.
        """
        if not file.is_file():
            raise CapsuleError(f"{file} does not exist or is not a file: expected a capsule")
        try:
            with safe_open(file, "pt") as opened:
                metadata: dict[str, str] = opened.metadata() or {}
                _require_format(file, metadata)
                tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            text = metadata.get("content", "")
            content = parse_object(text.encode(), "content", file)
        except (SafetensorError, OSError, CheckpointError) as error:
            if isinstance(error, CapsuleError):
                raise
            raise CapsuleError(f"{file} is not a capsule, or is damaged ({one_line(error)})") from error
        if metadata.get("digest") != _digest(text, tensors):
            raise CapsuleError(f"{file} is damaged (its digest does not match): download it or write it again")
        with reading(file):
            tensors |= {name: tensors[name].float() for name in content["widened"]}
            tensors |= {alias: tensors[name] for alias, name in content["aliases"].items()}
            contents = cls(CapsuleKind(content["kind"]))
            contents.values, contents.tensors, contents.left_out = content["values"], tensors, list(content["left_out"])
            return contents


def json_values(value: Any) -> Any:
    """Return a JSON value: numbers that JSON lacks become strings, tuples become lists."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): json_values(each) for key, each in value.items()}
    return [json_values(each) for each in value] if isinstance(value, (list, tuple)) else value


def _require_format(file: Path, metadata: Mapping[str, str]) -> None:
    if metadata.get("name") != NAME:
        raise CapsuleError(
            f"{file} is not a capsule: expected a file of nrl-models consistency --capsule, or of a watch"
        )
    file_format, writer = metadata.get("format", ""), metadata.get("written_by", "")
    if file_format != str(FORMAT):
        raise CapsuleError(
            f"{file} has capsule format {file_format}, which nrl_models {writer} reads; the installed nrl_models "
            f"{__version__} reads format {FORMAT}"
        )


def _stored_forms(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[str, torch.Tensor]]:
    """Return the digest of each tensor, and the tensor as it is stored."""
    forms: dict[int, tuple[str, torch.Tensor]] = {}
    for tensor in tensors.values():
        if id(tensor) not in forms:
            forms[id(tensor)] = tensor_digest(tensor), _narrowed(tensor.detach().cpu())
    return {name: forms[id(tensor)] for name, tensor in tensors.items()}


def _narrowed(tensor: torch.Tensor) -> torch.Tensor:
    """Return fp32 values as bf16 if that changes none of them, as for weights of a bf16 checkpoint."""
    if tensor.dtype != torch.float32 or not tensor.numel():
        return tensor
    half = tensor.bfloat16()
    return half if torch.equal(half.float(), tensor) else tensor


def _digest(text: str, tensors: Mapping[str, torch.Tensor]) -> str:
    hasher = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        hasher.update(f"{name} {tensor_digest(tensors[name])} ".encode())
    return hasher.hexdigest()


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Raise `CapsuleError` for missing or wrong values of a capsule while the context is open."""
    try:
        yield
    except NRLModelsError:
        raise
    except (KeyError, IndexError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CapsuleError(f"{file} is damaged ({one_line(error)}): download it or write it again") from error
