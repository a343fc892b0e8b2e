"""Engines whose model runs in a subprocess, see `worker_loop`."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, ClassVar, Self

import torch

from nrl_models.common.checkpoint.resolve_folder import resolve_folder
from nrl_models.common.config.positions import model_limit
from nrl_models.common.dtypes import dtype_name
from nrl_models.engines.answers import Checked
from nrl_models.engines.base import Engine
from nrl_models.engines.engine_types import BUCKET_BYTES, Capabilities, NamedTensor, Sample, Tokens, prompt_seeds
from nrl_models.engines.input_checks import require_options
from nrl_models.engines.processes.worker_process import WorkerProcess
from nrl_models.engines.transfer.transports import LOCAL, message_of
from nrl_models.errors import EngineError, EngineUnavailableError
from nrl_models.inputs.tokenizers import end_tokens
from nrl_models.loading.read_config import read_config
from nrl_models.logprobs.sampling import Sampling


class WorkerEngine(Engine):
    """An engine in a worker subprocess.

    Args:
        worker: Process that runs `module`.
        described: The worker's description of the model it has loaded.
        max_length: Maximum number of tokens of a sequence; None if unknown.
        ends: End-of-text token ids.

    Attributes:
        module: Module that the process runs.
        engine_name: Name of the engine in errors.
        distribution: Package that has to be installed. The extra has the engine's name.
        hint: Further installation advice for the error message.
    """

    bucket_bytes = BUCKET_BYTES
    module: ClassVar[str]
    engine_name: str
    distribution: ClassVar[str]
    hint: ClassVar[str] = ""

    def __init__(
        self, worker: WorkerProcess, described: dict[str, Any], max_length: int | None, ends: Sequence[int] = ()
    ) -> None:
        self.worker, self.max_length, self.ends = worker, max_length, list(ends)
        check = Checked(self.engine_name)
        self.vocabulary = check.whole(described.get("vocabulary"), "vocabulary", 1)
        self.dtype = getattr(torch, check.text(described.get("dtype"), "dtype"), None)
        self.described = described
        self._checked = Checked(self.engine_name, self.vocabulary)

    @classmethod
    def start(
        cls,
        path: str | Path,
        *,
        dtype: torch.dtype | None = None,
        max_length: int | None = None,
        load_format: str = "auto",
        seed: int = 0,
        **unknown: Any,
    ) -> Self:
        """Load a checkpoint in a new process.

        Args:
            path, dtype, max_length, load_format, seed: See `start_engine`.
            unknown: Unknown options, which raise an error.

        Raises:
            EngineError: If the package is not installed, lacks the model, or cannot load the checkpoint. Also if an
                option is unknown or has an invalid value.
        """
        known = ("dtype", "load_format", "max_length", "seed")
        require_options(cls.name, unknown, known, load_format=load_format, max_length=max_length, seed=seed)
        cls.require_installed()
        folder = resolve_folder(path)
        config = read_config(folder)
        worker = WorkerProcess([sys.executable, "-m", cls.module], cls.engine_name, os.environ)
        try:
            described = worker.ask(
                {
                    "path": str(folder),
                    "dtype": None if dtype is None else dtype_name(dtype),
                    "weights": load_format == "auto",
                    "seed": int(seed),
                }
            )
            return cls(worker, described, max_length or model_limit(config), end_tokens(folder, config))
        except BaseException:
            worker.close()
            raise

    @classmethod
    def require_installed(cls) -> None:
        """Check that the package of the subprocess is installed.

        Raises:
            EngineUnavailableError: If it is not.
        """
        try:
            version(cls.distribution)
        except PackageNotFoundError as error:
            raise EngineUnavailableError(
                f"{cls.distribution} is not installed: pip install '.[{cls.name}]' in a checkout{cls.hint}"
            ) from error

    def capabilities(self) -> Capabilities:
        """Return capabilities: everything except outputs of modules and a prefix cache."""
        return Capabilities(refit=True, max_length=self.max_length, vocabulary=self.vocabulary, dtype=self.dtype)

    def describe(self) -> dict[str, Any]:
        """Return versions and settings."""
        return {"engine": self.name, **self.described}

    def _generate(
        self, prompts: Sequence[Tokens], sampling: Sampling, *, max_new_tokens: int, seed: int, ignore_end: bool
    ) -> list[Sample]:
        answer = self.worker.ask(
            {
                "call": "generate",
                "prompts": [list(prompt) for prompt in prompts],
                "sampling": asdict(sampling),
                "max_new_tokens": max_new_tokens,
                "seeds": prompt_seeds(seed, len(prompts)),
                "ends": None if ignore_end else self.ends,
            }
        )
        return self._checked.samples(self._checked.listed(answer.get("samples"), "samples", len(prompts)), prompts)

    def _score(self, sequences: list[list[int]], sampling: Sampling, *, last: int | None) -> list[list[float]]:
        """Score sequences, see `Engine.score`."""
        asked = {"call": "score", "sequences": sequences, "sampling": asdict(sampling), "last": last}
        answer = self._checked.listed(self.worker.ask(asked).get("scores"), "scores", len(sequences))
        return [
            [math.nan, *self._checked.logprobs(scores, f"scores[{number}]", len(tokens) - 1)]
            for number, (scores, tokens) in enumerate(zip(answer, sequences, strict=True))
        ]

    def _refit(self, sent: Iterator[list[NamedTensor]], digests: bool) -> dict[str, Any]:
        """Send tensors. The worker keeps them until all have arrived, then applies all or none."""
        self.worker.ask({"call": "begin"})
        all_digests: dict[str, str] = {}
        for bucket in sent:
            with message_of(bucket, LOCAL) as message:
                all_digests |= self.worker.ask({"call": "receive", "message": message, "digests": digests})["digests"]
        self._changed = True  # after an interrupted call, the worker may still apply the tensors
        try:
            unwritten = self.worker.ask({"call": "apply"})["unwritten"]
        except EngineError:
            self._changed = False
            raise
        return {"digests": all_digests, "unwritten": unwritten, "stale_buffers": []}

    def close(self) -> None:
        """End the process."""
        self.worker.close()
