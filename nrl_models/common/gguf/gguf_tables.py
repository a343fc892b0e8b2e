"""transformers' tables for GGUF: configuration keys, tensor names, and transformations of tensors.

The tables are private to transformers. Only this module imports them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging

from nrl_models.common.checkpoint.limits import check_limits, limited_build
from nrl_models.common.checkpoint.local_path import is_gguf
from nrl_models.common.checkpoint.resolve_folder import resolve_folder
from nrl_models.common.gguf.gguf_header import INSTALL, GGUFHeader, kinds_of, read_header, refused
from nrl_models.common.gguf.gguf_metadata import with_all_metadata
from nrl_models.common.process_state import BUILDING
from nrl_models.common.upstream import classes_by_config, gguf_reading
from nrl_models.errors import ConfigurationError, NRLModelsError, Problem, ProblemKind, listed, one_line

NOT_CONFIGURATION = ("_model_name_or_path", "unk_token_id")
"""Keys that transformers reads but that are not in the configuration: the file's title, and a tokenizer's token."""

T5_TYPES = ("t5", "umt5")


def require_package(file: Path) -> None:
    """Raise if a GGUF file cannot be read because the package `gguf` is missing."""
    if find_spec("gguf") is None:
        detail = "is a GGUF file, and the package gguf is not installed"
        raise refused(file, [Problem(ProblemKind.FORMAT, file.name, detail)], INSTALL)


def configuration(file: Path) -> dict[str, Any]:
    """Return the configuration values, including `model_type`, that transformers reads from a file's metadata.

    Raises:
        CheckpointError: If the package is missing, the file is damaged, or transformers has no table for its
            architecture.
    """
    values = _values(file, file.stat().st_mtime_ns)
    return {key: value for key, value in values.items() if key not in NOT_CONFIGURATION}


@cache  # transformers needs seconds for the vocabulary
def _values(file: Path, changed: int) -> dict[str, Any]:
    require_package(file)
    header = read_header(file)
    kinds_of(header)  # raises for problems at which transformers' reader would fail
    try:
        values = gguf_reading().load_gguf_checkpoint(str(file))["config"]
    except Exception as error:  # any error of its reader and tables
        known = ", ".join(sorted(set(gguf_reading().GGUF_SUPPORTED_ARCHITECTURES) - {"general", "tokenizer"}))
        detail = f"is of architecture {header.architecture!r}, which transformers {transformers.__version__} does not "
        detail += f"read from GGUF ({one_line(error)}); it reads {known}"
        advice = "load the safetensors it was made from; llama.cpp reads the file itself"
        raise refused(file, [Problem(ProblemKind.FORMAT, file.name, detail)], advice) from error
    if misread := [key for key, value in values.items() if _is_misread(value)]:
        detail = f"{listed(misread)}: transformers {transformers.__version__} misreads the metadata of architecture "
        problem = Problem(ProblemKind.FORMAT, file.name, f"{detail}{header.architecture!r}")
        raise refused(file, [problem], "load the safetensors it was made from; llama.cpp reads the file itself")
    if values["model_type"] not in CONFIG_MAPPING:
        detail = (
            f"is of architecture {header.architecture!r}, which transformers {transformers.__version__} has no model "
        )
        problem = Problem(ProblemKind.FORMAT, file.name, f"{detail}for")
        raise refused(file, [problem], "load the safetensors it was made from; llama.cpp reads the file itself")
    check_limits(values, file)
    values.update(_feed_forward(header, values))
    try:
        return with_all_metadata(header, values, _table_of(values["model_type"], header.architecture))
    except NRLModelsError:
        raise
    except Exception as error:  # any error of the configuration class and its checks
        problem = Problem(ProblemKind.CONFIG, file.name, f"has metadata that makes no configuration: {one_line(error)}")
        raise refused(file, [problem], "correct the file's metadata, or download it again") from error


def _feed_forward(header: GGUFHeader, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration values of the feed-forward layers of a T5 model. Empty for other models.

    No key has them, and transformers reads every T5 file as gated with ReLU. llama.cpp uses a gated GELU if the file
    has gates, and ReLU without a gate if not.
    """
    if values["model_type"] not in T5_TYPES:
        return {}
    is_gated = any(".ffn_gate." in tensor.name for tensor in header.tensors)
    return {"feed_forward_proj": "gated-gelu" if is_gated else "relu", "is_gated_act": is_gated}


def _is_misread(value: Any) -> bool:
    """Return True if transformers would use part of the file's bytes as the value."""
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else (value,)
    return any(isinstance(part, np.ndarray) for part in parts)


def _table_of(model_type: str, architecture: str) -> Mapping[str, Any]:
    """Return transformers' table of an architecture's keys, without its name."""
    tables = gguf_reading().GGUF_TO_TRANSFORMERS_MAPPING["config"]
    return tables.get(model_type.removesuffix("_text")) or tables[architecture]


def upstream_source(path: str | Path) -> tuple[str | Path, dict[str, Any]]:
    """Return path and keywords of transformers' `from_pretrained` to load a checkpoint's dequantized weights."""
    checkpoint = resolve_folder(path)
    if not is_gguf(checkpoint):
        return path, {}
    keywords: dict[str, Any] = {"gguf_file": checkpoint.name}
    if hasattr(transformers, "GgufConfig"):  # older transformers has only `gguf_file`
        keywords["quantization_config"] = transformers.GgufConfig(dequantize=True)
    return checkpoint.parent, keywords


def load_tokenizer(file: Path) -> Any | None:
    """Return the tokenizer in a GGUF file, as transformers builds it; None if there is none.

    Raises:
        CheckpointError: If transformers cannot build it.
    """
    if str(read_header(file).values.get("tokenizer.ggml.model", "none")) in ("none", "no_vocab"):
        return None
    try:
        return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, trust_remote_code=False)
    except Exception as error:  # any error of its conversion
        detail = f"holds a tokenizer that transformers {transformers.__version__} does not build: {one_line(error)}"
        advice = "take the tokenizer of the checkpoint it was made from"
        raise refused(file, [Problem(ProblemKind.FORMAT, file.name, detail)], advice) from error


class Tables:
    """Mapping from a file's tensors to those of transformers' model.

    Args:
        header: Header of the file.

    Attributes:
        names: transformers' name by the tensor's name in the file. Stacks of experts have no `.weight` suffix in the
            file, and two of them may form one tensor in the model.

    Raises:
        CheckpointError: See `configuration`. Also if no model of transformers has these names.
    """

    def __init__(self, header: GGUFHeader) -> None:
        reading = gguf_reading()
        values = dict(_values(header.file, header.file.stat().st_mtime_ns))
        self._file = header.file
        self._processor: Any = reading.TENSOR_PROCESSORS.get(header.architecture, reading.TensorProcessor)(
            config=values
        )
        try:
            with limited_build(len(header.tensors)):
                model: Any = _Shallow(_model_of(values), _LEVELS)
            self.names: Mapping[str, str] = reading.get_gguf_hf_weights_map(model, self._processor)
        except ConfigurationError:
            raise
        except Exception as error:
            detail = f"transformers {transformers.__version__} does not know the tensors' names: {one_line(error)}"
            problem = Problem(ProblemKind.FORMAT, header.file.name, detail)
            raise refused(header.file, [problem], "try a newer transformers, or a newer gguf package") from error

    def target(self, name: str) -> str | None:
        """Return transformers' name for the tensor that `name` equals or is part of; None if it has none."""
        return self.names.get(name) or self.names.get(name.removesuffix(".weight"))

    def is_whole(self, name: str) -> bool:
        """Return True if the tensor is the complete target. A stack of experts may be a part."""
        return name in self.names or name.removesuffix(".weight") not in self.names

    def undo(self, arrays: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
        """Revert the changes of llama.cpp's converter. Returns tensors by transformers' name.

        Args:
            arrays: Dequantized fp32 arrays by their names in the file.
        """
        done: dict[str, Any] = {"tensors": {}}
        for name, array in arrays.items():
            result = self._processed(array, name, done)
            if result.name is not None and (target := self.target(result.name)) is not None:
                plain = np.require(result.weights, np.float32, ["C", "W"])
                done["tensors"][target] = torch.from_numpy(plain)
        return done["tensors"]

    def shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape that `undo` produces from a complete tensor of this shape."""
        # Needs no memory. -1, because mamba takes the logarithm of the negative.
        weights = np.broadcast_to(np.float32(-1), shape)
        return tuple(self._processed(weights, name, {"tensors": {}}).weights.shape)

    def _processed(self, weights: np.ndarray, name: str, done: dict[str, Any]) -> Any:
        try:
            return self._processor.process(
                weights=weights, name=name, tensor_key_mapping=self.names, parsed_parameters=done
            )
        except Exception as error:  # any error of a shape that does not match the metadata
            detail = f"has shape {weights.shape}, which does not fit the file's metadata: {one_line(error)}"
            problem = Problem(ProblemKind.SHAPE, name, detail, self._file.name)
            raise refused(self._file, [problem], "download the file again") from error


_LEVELS = 2
"""Levels of modules to search. GGUF's names refer to parts of the base model, but not to deeper modules."""


class _Shallow:
    """A view of a model for transformers' table of names that shows only a few levels of modules.

    The table visits every module, with a new copy of the `gguf` package's table each time, which would take seconds.
    """

    def __init__(self, module: Any, levels: int) -> None:
        self._module, self._levels = module, levels
        self.config = getattr(module, "config", None)

    def state_dict(self) -> Any:
        """Return the tensors by name."""
        return self._module.state_dict()

    def named_children(self) -> list[tuple[str, _Shallow]]:
        """Return the direct submodules."""
        parts = self._module.named_children() if self._levels else ()
        return [(name, _Shallow(part, self._levels - 1)) for name, part in parts]


def _model_of(values: Mapping[str, Any]) -> torch.nn.Module:
    """Return transformers' model for a configuration on meta, for its names."""
    config = AutoConfig.for_model(**values)
    named = [getattr(transformers, name, None) for name in config.architectures or ()]
    autos: tuple[Any, ...] = (AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModel)
    classes = [*filter(None, named), *(auto for auto in autos if type(config) in classes_by_config(auto))]
    with BUILDING, torch.device("meta"):
        verbosity = logging.get_verbosity()
        logging.set_verbosity_error()  # the model is only temporary
        try:
            return classes[0].from_config(config) if classes[0] in autos else classes[0]._from_config(config)
        finally:
            logging.set_verbosity(verbosity)
