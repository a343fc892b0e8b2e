"""Dequantize compressed-tensors checkpoints (llm-compressor) on load.

The package `compressed-tensors` dequantizes one weight per call. transformers calls it as well, but fails for experts
in INT8, and stacks experts in NVFP4 incorrectly. Here experts are stacked after they are dequantized.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from packaging.version import Version

from nrl_models.common.checkpoint.dequantized import CACHE_SCALES, from_fp8, settings_of
from nrl_models.common.checkpoint.files import CheckpointFiles
from nrl_models.common.checkpoint.stored_tensors import StoredTensor
from nrl_models.common.compressed.compressed_shapes import expected_dtypes, expected_shapes, plain_shape
from nrl_models.errors import CheckpointError, Problem, ProblemKind, UnmetRequirementError, one_line, shown

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme

METHOD = "compressed-tensors"
"""The `quant_method` of these checkpoints."""

MINIMUM = "0.16"
"""The first version of the package that dequantizes all `FORMATS`."""

FORMATS = (
    "float-quantized",
    "int-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "pack-quantized",
)
"""Supported formats. Other formats are mixtures of these, or legacy."""

PARTS = ("weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_global_scale", "weight_shape")
"""Names of tensors that one weight is stored as."""

OF_ACTIVATIONS = tuple(f"{side}_{part}" for side in ("input", "output") for part in ("scale", "zero_point"))
NOT_OF_WEIGHTS = (*OF_ACTIVATIONS, "input_global_scale")
"""Names of tensors that quantize inputs and outputs of a linear. Weights do not depend on them."""

OF_CACHE = (*CACHE_SCALES, ".k_zero_point", ".v_zero_point", ".q_zero_point")
"""Ends of names of tensors that quantize the key-value cache."""

GROUP_INDEX = "weight_g_idx"
"""The tensor that assigns columns to groups out of order."""

ADVICE = "load the checkpoint that it was quantized from, or quantize that in one of the formats that are read"


@dataclass(frozen=True, slots=True)
class Compressed:
    """A weight that is stored as several tensors.

    Args:
        parts: The tensors by their names in the layer, see `PARTS`.
        scheme: The package's description of the quantization.
        format: The package's name of the storage format.
    """

    parts: Mapping[str, StoredTensor]
    scheme: QuantizationScheme
    format: str


class CompressedFiles(CheckpointFiles):
    """Tensors of a compressed-tensors checkpoint by key, dequantized on read.

    A weight and its scales are read as `weight` in fp32. Scales of activations and of the key-value cache are dropped.

    Args:
        folder: See `CheckpointFiles`.
        quantized_as: The configuration's `quantization_config`.
        variant: See `CheckpointFiles`.

    Raises:
        UnmetRequirementError: If the package `compressed-tensors` is not installed or too old.
        CheckpointError: See `CheckpointFiles`. Also if settings or formats are not supported, scales are missing, or
            shapes do not match the settings. Lists all problems.
    """

    def __init__(self, folder: str | Path, quantized_as: Any, variant: str | None = None) -> None:
        settings = settings_of(quantized_as)
        config = _parsed(settings, Path(folder))
        super().__init__(folder, variant)
        self._compressed: dict[str, Compressed] = {}
        if problems := [*_unsupported(settings), *self._collect(config)]:
            self.close()
            raise CheckpointError(f"cannot load {self.folder}, quantized with {METHOD}", problems, [ADVICE])
        self.dequantized = frozenset(self._compressed)

    def stored_parts(self, tensor: StoredTensor) -> tuple[tuple[torch.Tensor, ...], Callable[..., torch.Tensor] | None]:
        """Return the parts of a quantized tensor, and the function that dequantizes them."""
        compressed = self._compressed.get(tensor.key)
        if compressed is None:
            return super().stored_parts(tensor)
        parts = tuple(self.read_stored(part) for part in compressed.parts.values())
        names = tuple(compressed.parts)
        return parts, partial(decompressed, names, compressed.format, compressed.scheme)

    def _collect(self, config: QuantizationConfig) -> list[Problem]:
        """Replace the parts of each quantized weight by the weight."""
        problems: list[Problem] = []
        for key in [key for key in self.tensors if key.endswith(OF_CACHE)]:
            del self.tensors[key]
        for key in [key for key in self.tensors if key.endswith((".weight_scale", ".weight_packed"))]:
            layer = key.rpartition(".")[0]
            if f"{layer}.weight" in self._compressed or key not in self.tensors:
                continue
            for name in NOT_OF_WEIGHTS:
                self.tensors.pop(f"{layer}.{name}", None)
            parts = {name: part for name in PARTS if (part := self.tensors.pop(f"{layer}.{name}", None)) is not None}
            scheme = _scheme_of(layer, config)
            if isinstance(scheme, str):
                problems.append(next(iter(parts.values())).problem(ProblemKind.CONFIG, scheme))
                continue
            zeros = parts.pop("weight_zero_point", None) if scheme.weights.symmetric else None
            if zeros is not None and self.read_stored(zeros).float().any():  # older packages stored zeros
                detail = "is not zero, and quantization_config states that weights are symmetric"
                problems.append(zeros.problem(ProblemKind.CONFIG, detail))
                continue
            compressed = Compressed(parts, scheme, str(_format_of(scheme, config)))
            if misfits := self._misfits(layer, compressed):
                problems += misfits
                continue
            values, weight = parts.get("weight_packed") or parts["weight"], f"{layer}.weight"
            self._compressed[weight] = compressed
            self.tensors[weight] = replace(values, key=weight, dtype=torch.float32, shape=self._shape(compressed))
        return problems

    def _shape(self, compressed: Compressed) -> tuple[int, ...]:
        stored = compressed.parts.get("weight_shape")
        stated = None if stored is None else tuple(self.read_stored(stored).tolist())
        return plain_shape(compressed.format, {name: part.shape for name, part in compressed.parts.items()}, stated)

    def _misfits(self, layer: str, compressed: Compressed) -> list[Problem]:
        """Return problems with the parts of one weight."""
        parts, any_part = compressed.parts, next(iter(compressed.parts.values()))
        if compressed.format not in FORMATS:
            detail = f"is stored in format {compressed.format!r}; formats that are read: {', '.join(FORMATS)}"
            return [any_part.problem(ProblemKind.FORMAT, detail)]
        if (index := self.tensors.get(f"{layer}.{GROUP_INDEX}")) is not None:
            return [index.problem(ProblemKind.FORMAT, "orders columns by their activations, which is not read")]
        weights: Any = compressed.scheme.weights
        if weights.strategy == "block" and (not weights.symmetric or "pack" in compressed.format):
            return [any_part.problem(ProblemKind.FORMAT, "is quantized in blocks with zero points, or packed")]
        required = ["weight_packed" if "pack" in compressed.format else "weight", "weight_scale"]
        required += ["weight_shape"] if compressed.format == "pack-quantized" else []
        required += ["weight_global_scale"] if compressed.format.startswith("nvfp4") else []
        required += [] if weights.symmetric else ["weight_zero_point"]
        if missing := [name for name in required if name not in parts]:
            detail = f"is missing, and {any_part.key} is quantized as {compressed.format}"
            return [Problem(ProblemKind.MISSING, f"{layer}.{name}", detail, any_part.file) for name in missing]
        if problems := [
            parts[name].problem(ProblemKind.DTYPE, f"is {parts[name].dtype}, expected {' or '.join(map(str, fit))}")
            for name, fit in expected_dtypes(compressed.format, weights).items()
            if name in parts and parts[name].dtype not in fit
        ]:
            return problems
        if "weight_shape" in parts and parts["weight_shape"].shape != (2,):
            return [parts["weight_shape"].problem(ProblemKind.SHAPE, "expected two sizes, of rows and columns")]
        expected = expected_shapes(compressed.format, weights, self._shape(compressed))
        return [
            parts[name].problem(
                ProblemKind.SHAPE,
                f"has shape {parts[name].shape}, expected {' or '.join(map(str, fit)) or 'that of a matrix'}",
            )
            for name, fit in expected.items()
            if name in parts and parts[name].shape not in fit
        ]


def decompressed(names: Sequence[str], format_name: str, scheme: Any, *parts: torch.Tensor) -> torch.Tensor:
    """Dequantize one weight with the package.

    Args:
        names: Names of the parts, see `PARTS`.
        format_name: Storage format.
        scheme: Quantization scheme.
        parts: Stored tensors, in the order of `names`.

    Returns:
        `(rows, columns)` in fp32, rounded to the dtype that the package computes in.
    """
    from compressed_tensors.compressors import BaseCompressor

    state = dict(zip(names, parts, strict=True))
    if scheme.weights.strategy == "block":  # the package computes the size of uneven blocks incorrectly before 0.19
        rows, columns = scheme.weights.block_structure
        return from_fp8(state["weight"].to(torch.float32), state["weight_scale"], (rows, columns))
    compressor: Any = BaseCompressor.get_value_from_registry(format_name)
    return compressor.decompress(state, scheme)["weight"].detach().to(torch.float32)


def _parsed(settings: Mapping[str, Any], folder: Path) -> QuantizationConfig:
    """Parse `quantization_config`."""
    if find_spec("compressed_tensors") is None:
        raise UnmetRequirementError(
            f"cannot load {folder}: its weights are quantized with {METHOD}, and the package is not installed. Install "
            "it: pip install compressed-tensors"
        )
    if Version(installed := version("compressed-tensors")) < Version(MINIMUM):
        raise UnmetRequirementError(
            f"cannot load {folder}: its weights are quantized with {METHOD}, which needs "
            f"compressed-tensors>={MINIMUM}; {installed} is installed. Install a newer one: "
            "pip install compressed-tensors"
        )
    from compressed_tensors.quantization import QuantizationConfig

    try:
        return QuantizationConfig.model_validate({"config_groups": {}, **settings})
    except Exception as error:  # any error of the package for invalid values
        problem = Problem(ProblemKind.CONFIG, "quantization_config", f"is invalid: {one_line(error)}")
        raise CheckpointError(f"cannot load {folder}", [problem], ["correct it in config.json"]) from error


def _unsupported(settings: Mapping[str, Any]) -> list[Problem]:
    """Return problems with settings under which weights differ from the unquantized model's."""
    problems = []
    for name in ("transform_config", "sparsity_config"):
        value = settings.get(name) or {}
        is_dense = isinstance(value, Mapping) and value.get("format") == "dense"
        if value and not is_dense:
            detail = f"is {shown(value)}, which is not read"
            problems.append(Problem(ProblemKind.UNSUPPORTED, f"quantization_config.{name}", detail))
    return problems


def _scheme_of(layer: str, config: QuantizationConfig) -> QuantizationScheme | str:
    """Return the scheme of a layer: by its name, else by its class, as the package does; or an error message.

    Raises:
        CheckpointError: A target is not a regular expression.
    """
    from compressed_tensors.utils import match_name

    def is_target(group: str, target: str) -> bool:
        try:
            return bool(match_name(layer, target))
        except re.error as error:
            subject = f"quantization_config.config_groups.{group}.targets"
            problem = Problem(ProblemKind.CONFIG, subject, f"{target!r} is not a regular expression: {error}")
            raise CheckpointError("cannot read the checkpoint", [problem], ["correct it in config.json"]) from error

    groups = {name: scheme for name, scheme in config.config_groups.items() if scheme.weights is not None}
    schemes = list(groups.values())
    by_name = [scheme for name, scheme in groups.items() if any(is_target(name, target) for target in scheme.targets)]
    layer_class = "Embedding" if layer.rpartition(".")[2] in ("embed_tokens", "wte") else "Linear"
    by_class = [scheme for scheme in schemes if layer_class in scheme.targets]
    matches = by_name or by_class
    if not matches:
        return "is quantized, and no group of quantization_config.config_groups has it as a target"
    if any(scheme != matches[0] for scheme in matches):
        return f"is a target of {len(matches)} groups of quantization_config.config_groups, expected one"
    return matches[0]


def _format_of(scheme: QuantizationScheme, config: QuantizationConfig) -> str:
    name = scheme.format or config.format
    return getattr(name, "value", name)
