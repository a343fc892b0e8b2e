"""The checkpoint that is certified, and what the result depends on."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import GenerationConfig, PreTrainedConfig

from nrl_models.auto import auto_class_for
from nrl_models.common.checkpoint.generations import READ
from nrl_models.common.checkpoint.resolve_folder import resolve_folder
from nrl_models.common.config.generation import generation_settings
from nrl_models.common.trust.own_folder import results_in
from nrl_models.common.trust.servers import VLLMS
from nrl_models.consistency.cells import THRESHOLD
from nrl_models.consistency.measure import Measurement
from nrl_models.consistency.prompts import Prompts
from nrl_models.consistency.refit import unmeasured_bound
from nrl_models.engines import start_engine
from nrl_models.engines.base import Engine
from nrl_models.engines.hf import HFEngine
from nrl_models.engines.start import engine_keywords, longest_sequence, room_to_score
from nrl_models.errors import NRLModelsError
from nrl_models.family import FamilyModel
from nrl_models.loading.read_config import read_config
from nrl_models.onboarding.inspect import Inspection, inspect

LONGEST, FULL_LONGEST = 2_048, 10_000
"""Maximum length of the longest compared sequence, without and with `full`."""


@dataclass(frozen=True)
class Options:
    """How a checkpoint is certified.

    Args:
        engine: name of the engine, or a server URL; None for no engine.
        engine_options: options passed to the engine.
        dtype: compute dtype of engine and trainer; None for the checkpoint's.
        device: device of the trainer.
        full: check the 36 cells of NeMo RL's guide, instead of 8.
        seed: random seed for inputs.
        in_loop: mesh sizes of the training loop that is run at learning rate 0, such as `{"fsdp": 2}`; empty for one
            process, None to run none.
        layers: number of first layers that are checked; None for all.
    """

    engine: str | None = None
    engine_options: Mapping[str, Any] = field(default_factory=dict)
    dtype: torch.dtype | None = None
    device: str = "cpu"
    full: bool = False
    seed: int = 0
    in_loop: Mapping[str, int] | None = None
    layers: int | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the options as JSON values, without secrets."""
        from nrl_models.common.dtypes import dtype_name
        from nrl_models.common.trust.servers import is_secret, shown_argument

        options = {key: str(value) for key, value in self.engine_options.items() if not is_secret(key)}
        return {
            "engine": None if self.engine is None else shown_argument(self.engine),
            "engine_options": options,
            "dtype": None if self.dtype is None else dtype_name(self.dtype),
            "device": self.device,
            "full": self.full,
            "seed": self.seed,
            "in_loop": None if self.in_loop is None else dict(self.in_loop),
            "layers": self.layers,
        }


@dataclass
class CheckpointUnderTest:
    """A checkpoint with options.

    Args:
        path: checkpoint directory, GGUF file or Hub repository.
        options: how it is certified.
        out: directory for measurements.
        key: digest of everything that results depend on.
        fresh: discard earlier measurements.
        deadline: `time.monotonic()` after which no further step, cell or check starts; None for no limit.
    """

    path: str | Path
    options: Options
    out: Path
    key: str = ""
    fresh: bool = False
    deadline: float | None = None

    @cached_property
    def folder(self) -> Path:
        """The directory or GGUF file."""
        return resolve_folder(self.path)

    @property
    def name(self) -> str:
        """The last part of the path."""
        return Path(self.path).resolve().name

    @cached_property
    def config(self) -> PreTrainedConfig:
        """The configuration."""
        return read_config(self.folder)

    @cached_property
    def generation(self) -> GenerationConfig | None:
        """The generation configuration; None if the checkpoint has none."""
        return generation_settings(self.folder)

    @cached_property
    def model(self) -> FamilyModel:
        """The model in fp32, in evaluation mode."""
        loaded: FamilyModel = auto_class_for(self.folder).from_pretrained(
            self.folder, dtype=torch.float32, device=self.options.device
        )
        return loaded.eval()

    @cached_property
    def inspection(self) -> Inspection:
        """Facts of the checkpoint that need no weights."""
        return inspect(self.folder)

    @property
    def embedding_rows(self) -> int:
        """Number of rows of the input embeddings."""
        weight = self.model.get_input_embeddings().weight
        assert isinstance(weight, torch.Tensor)
        return len(weight)

    @cached_property
    def parameters(self) -> int:
        """Number of parameters."""
        built = auto_class_for(self.folder).from_config(self.config, device="meta")
        return sum(parameter.numel() for parameter in built.parameters())

    @property
    def held_bytes(self) -> int:
        """Bytes of the models that are loaded."""
        loaded = [self.__dict__.get("model"), getattr(self.__dict__.get("trainer"), "model", None)]
        return sum(parameter.nbytes for model in loaded if model is not None for parameter in model.parameters())

    def missing_memory(self, copies: int) -> str:
        """Return how much memory copies of the weights in fp32 need, if more than is available; else an empty string.

        Args:
            copies: number of copies that are held at the same time. Copies that are already held count as available.
        """
        try:
            needed = copies * torch.float32.itemsize * self.parameters
        except NRLModelsError:  # the check `files` reports it
            return ""
        available = available_memory(torch.device(self.options.device)) + self.held_bytes
        if needed <= available:
            return ""
        return (
            f"needs {_size(needed)} of memory for {copies} cop{'y' if copies == 1 else 'ies'} of the weights in fp32, "
            f"{_size(available)} are available; use a larger machine, or check some layers (--layers 4)"
        )

    @property
    def threshold(self) -> float:
        """Bound of `token_mult_prob_error`, unless the noise floor explains more."""
        dtype = self.options.dtype or getattr(self.config, "dtype", None)
        return unmeasured_bound(dtype) if isinstance(dtype, torch.dtype) else THRESHOLD

    @cached_property
    def trainer(self) -> HFEngine:
        """The trainer's model in the compute dtype, to compare with `engine`."""
        options = self.options
        model = auto_class_for(self.folder).from_pretrained(
            self.folder, dtype=options.dtype or "auto", device=options.device
        )
        return HFEngine(model, "trainer")

    @cached_property
    def engine(self) -> Engine:
        """The engine on the checkpoint's weights, for sequences of up to `longest` tokens."""
        return self.start_engine()

    def start_engine(self, **more: Any) -> Engine:
        """Start the engine with the user's options and `more`."""
        options = self.options
        assert options.engine is not None
        length = {"max_length": self.longest + room_to_score(options.engine)} if options.engine in VLLMS else {}
        keywords: dict[str, Any] = {"dtype": options.dtype, "seed": options.seed, **length, **more}
        return start_engine(options.engine, self.folder, **engine_keywords(options.engine_options, **keywords))

    @cached_property
    def longest(self) -> int:
        """Length of the longest sequence that is compared: the model's limit, at most `LONGEST` unless `full`."""
        assert self.options.engine is not None
        limit = longest_sequence(self.folder, self.options.engine)
        most = FULL_LONGEST if self.options.full else LONGEST
        return most if limit is None else min(most, limit)

    @property
    def prompts(self) -> Prompts:
        """Prompts for the model."""
        return Prompts.of_checkpoint(self.folder, self.trainer.capabilities().vocabulary or 0)

    @property
    def measurements(self) -> Path:
        """Directory for the measurements of the matrix. Another key has another directory."""
        return self.out / f"measurements-{self.key[:8]}"

    def save_plotted(self, name: str, measurement: Measurement) -> None:
        """Save log-probabilities that a check compared, for the plots of the report.

        Args:
            name: name of the check.
            measurement: the log-probabilities.
        """
        measurement.save(plotted_file(self.out, name))

    def delete_plotted(self, names: Iterable[str]) -> None:
        """Delete the log-probabilities of checks that run again."""
        for name in names:
            plotted_file(self.out, name).unlink(missing_ok=True)

    def release_model(self) -> None:
        """Free the model; the next access loads it again."""
        self.__dict__.pop("model", None)

    def release_engine(self) -> None:
        """Close the engine, and free the trainer's model; the next access starts them again."""
        self.__dict__.pop("trainer", None)
        if (engine := self.__dict__.pop("engine", None)) is not None:
            engine.close()


def plotted_file(folder: Path, name: str) -> Path:
    """Return the file with the log-probabilities that a check compared.

    Args:
        folder: directory of results.
        name: name of the check.
    """
    return folder / "plotted" / f"{name.replace(' ', '-')}.safetensors"


def available_memory(device: torch.device) -> int:
    """Return the free memory of a GPU, or of this machine for other devices, in bytes."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e8 else f"{nbytes / 1e6:.1f} MB"


def file_hashes(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file that models, tokenizers and engines read, by its path in `folder`."""
    if folder.is_file():
        return {folder.name: _sha256(folder)}
    return {str(path.relative_to(folder)): _sha256(path) for path in read_files(folder)}


def read_files(folder: Path) -> list[Path]:
    """Return the files in a checkpoint's directory that models, tokenizers and engines read.

    Hidden files are left out, and results of commands that ran in the directory.
    """
    results = results_in(folder)
    return [
        path
        for path in sorted(folder.rglob("*"))
        if path.suffix in READ
        and path.is_file()
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
        and results.isdisjoint(path.parents)
    ]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hardware() -> dict[str, str]:
    """Describe the processor and the GPU of this machine."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    return {"machine": platform.machine(), "cores": str(os.cpu_count()), "gpu": gpu}
