"""Tiny checkpoints and inputs for `numbers`, as fixtures that do not depend on the transformers version.

A fixture contains a configuration with every value, the names and shapes of the checkpoint's tensors, and the inputs.
Tensor values are derived from names and shapes, so they are the same in every version.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from transformers import PreTrainedModel

FOLDER = Path(__file__).resolve().parents[3] / "tests" / "fixtures" / "upstream_numbers"
"""The folder of the fixtures."""

LITERAL_LIMIT = 4096
"""Integer tensors of up to this many elements are stored literally."""


@dataclass(frozen=True)
class NumberCase:
    """A fixture.

    Attributes:
        architecture: Name of transformers' class.
        module: The module that defined it in the version that the fixture was created with.
        config: Every value of the tiny configuration.
        tensors: Tensors of the checkpoint by name, see `filled`.
        inputs: Inputs by kind (`text`, `media`) and argument, see `filled`.
        generates: Whether the class has `generate`.
    """

    architecture: str
    module: str
    config: dict[str, Any]
    tensors: dict[str, dict[str, Any]]
    inputs: dict[str, dict[str, dict[str, Any]]]
    generates: bool

    def model_class(self) -> type[PreTrainedModel] | None:
        """Return transformers' class in the installed version. None if it does not exist."""
        found = getattr(transformers, self.architecture, None)
        if found is None:
            try:
                found = getattr(importlib.import_module(self.module), self.architecture, None)
            except ImportError:
                return None
        return found if isinstance(found, type) and issubclass(found, PreTrainedModel) else None

    def config_values(self) -> dict[str, Any]:
        """Return a new copy of the configuration's values. transformers writes infinity as a dict in JSON."""
        return json.loads(json.dumps(self.config), object_hook=_number_or_dict)

    def checkpoint(self) -> dict[str, torch.Tensor]:
        """Return the tensors of the checkpoint's file."""
        return {name: filled(name, stated) for name, stated in self.tensors.items()}

    def input_tensors(self, kind: str) -> dict[str, torch.Tensor] | None:
        """Return keyword arguments of a forward. None if the class has no inputs of this kind."""
        stated = self.inputs.get(kind)
        return None if stated is None else {name: filled(name, value) for name, value in stated.items()}

    def to_file(self, folder: Path) -> None:
        """Write the fixture."""
        folder.mkdir(parents=True, exist_ok=True)
        lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in vars(self).items()]
        (folder / f"{self.architecture}.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")

    @classmethod
    def from_file(cls, architecture: str, folder: Path = FOLDER) -> NumberCase:
        """Read the fixture of an architecture."""
        return cls(**json.loads((folder / f"{architecture}.json").read_text()))


def stored_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Read every tensor in the safetensors files of a folder."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def case_names(folder: Path = FOLDER) -> list[str]:
    """Return the architectures that have a fixture."""
    return sorted(path.stem for path in folder.glob("*.json"))


def stated(tensor: torch.Tensor, *, literally: bool = False) -> dict[str, Any]:
    """Describe a tensor for a fixture. `filled` creates a tensor from the description.

    Integers are literal, or counted in large tensors. A constant is stored once. For floating-point tensors, shape,
    mean and standard deviation are stored.

    Args:
        tensor: The tensor.
        literally: Whether to also store floating-point numbers literally, rounded to three digits.
    """
    shape, dtype = list(tensor.shape), str(tensor.dtype).removeprefix("torch.")
    if tensor.is_floating_point() and literally:
        return {"shape": shape, "dtype": dtype, "values": [_rounded(value) for value in tensor.flatten().tolist()]}
    if not tensor.is_floating_point():
        if tensor.numel() and bool((tensor == tensor.flatten()[0]).all()):
            return {"shape": shape, "dtype": dtype, "everywhere": tensor.flatten()[0].item()}
        if tensor.numel() <= LITERAL_LIMIT:
            return {"shape": shape, "dtype": dtype, "values": tensor.flatten().tolist()}
        return {"shape": shape, "dtype": dtype, "below": int(tensor.max()) + 1}
    values = tensor.double()
    spread = float(values.std()) if values.numel() > 1 else 0.0
    return {"shape": shape, "mean": _rounded(float(values.mean())), "std": _rounded(spread)}


def filled(name: str, stated: Mapping[str, Any]) -> torch.Tensor:
    """Create a tensor from its description: literal, counted, or random numbers derived from name and shape."""
    shape = stated["shape"]
    dtype: torch.dtype = getattr(torch, stated.get("dtype", "float32"))
    if "values" in stated:
        return torch.tensor(stated["values"], dtype=dtype).view(shape)
    if "everywhere" in stated:
        return torch.full(shape, stated["everywhere"], dtype=dtype)
    if "below" in stated:
        return (torch.arange(math.prod(shape)) % stated["below"]).to(dtype).view(shape)
    seed = int.from_bytes(hashlib.sha256(f"{name} {shape}".encode()).digest()[:6], "big")
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
    return noise * stated["std"] + stated["mean"]


def with_every_value(config: Any) -> dict[str, Any]:
    """Return a configuration's values as JSON, without versions and paths."""
    values = json.loads(config.to_json_string(use_diff=False))
    return dict(_without_versions(values))


def _number_or_dict(values: dict[str, Any]) -> Any:
    return float(values["__float__"]) if values.keys() == {"__float__"} else values


def _without_versions(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if key not in ("transformers_version", "_name_or_path", "name_or_path", "_attn_implementation"):
            yield key, dict(_without_versions(value)) if isinstance(value, dict) else value


def _rounded(number: float) -> float:
    return float(f"{number:.3g}")
