"""vLLM in another Python environment, for example another version than this environment's.

`environment_worker.py` runs with that environment's interpreter, and needs only vLLM there.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch

from nrl_models.common.checkpoint.local_path import as_path
from nrl_models.common.checkpoint.resolve_folder import resolve_folder
from nrl_models.common.dtypes import dtype_name
from nrl_models.engines.answers import Checked
from nrl_models.engines.base import Engine
from nrl_models.engines.engine_types import VLLM_TEMPERATURES, Capabilities, Sample, Tokens
from nrl_models.engines.input_checks import require_max_length
from nrl_models.engines.processes.worker_engine import WorkerEngine
from nrl_models.engines.processes.worker_process import WorkerProcess
from nrl_models.engines.vllm.vllm_start import KV_CACHE_BYTES
from nrl_models.errors import CheckpointError, EngineError, EngineUnavailableError, details_of
from nrl_models.inputs.tokenizers import end_tokens
from nrl_models.loading.read_config import read_config
from nrl_models.logprobs.sampling import Sampling

WORKER = Path(__file__).with_name("environment_worker.py")


class EnvironmentEngine(WorkerEngine):
    """A running vLLM of another environment. It generates, and scores at temperature 1.

    Args:
        python: Interpreter of the environment.
        keywords: Keywords of `vllm.LLM`.

    Raises:
        EngineError: If the interpreter does not exist, or vLLM does not start.
    """

    name = "vllm"
    sampled_per_score = 1

    def __init__(self, python: Path, keywords: dict[str, Any]) -> None:
        self.python, self.path = python, keywords["model"]
        self.engine_name = f"vLLM of {python}"
        environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
        for name, value in (("VLLM_CPU_OMP_THREADS_BIND", "nobind"), ("OMP_WAIT_POLICY", "PASSIVE")):
            environment.setdefault(name, value)
        environment.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        # -I: do not import modules from PYTHONPATH or this directory.
        worker = WorkerProcess([str(python), "-I", str(WORKER)], self.engine_name, environment)
        try:
            # Not as an argument, because all users of the machine can read it: options may have a token of the hub.
            described = worker.ask(keywords)
            check = Checked(self.engine_name)
            for name in ("vllm", "logprobs_mode"):
                check.text(described.get(name), name)
            max_length = check.whole(described.get("max_model_len"), "max_model_len", 1)
            described["prefix_caching"] = bool(described.get("prefix_caching"))
            super().__init__(worker, described, max_length)
        except BaseException:
            worker.close()
            raise

    @classmethod
    def start(  # type: ignore[override]
        cls,
        path: str | Path,
        *,
        python: str | Path,
        dtype: torch.dtype | None = None,
        max_length: int | None = None,
        load_format: str = "auto",
        seed: int = 0,
        **options: Any,
    ) -> Self:
        """Start vLLM on a checkpoint.

        Args:
            path, dtype, max_length, load_format, seed: See `start_engine`. `max_length` is vLLM's `max_model_len`.
            python: Interpreter of the environment, or its directory.
            options: Further keywords of `vllm.LLM`, with values that JSON can represent.

        Raises:
            EngineError: If the environment does not exist, or vLLM does not start in it.
        """
        require_max_length(max_length)
        keywords: dict[str, Any] = {
            "model": str(path),
            "load_format": load_format,
            "seed": seed,
            "logprobs_mode": "processed_logprobs",
            "kv_cache_memory_bytes": KV_CACHE_BYTES,
            "enforce_eager": True,
            "skip_tokenizer_init": True,
        }
        keywords |= {} if dtype is None else {"dtype": dtype_name(dtype)}
        keywords |= {} if max_length is None else {"max_model_len": max_length}
        return cls(interpreter_of(python), keywords | options)

    def capabilities(self) -> Capabilities:
        """Return capabilities: generation, and scores at temperature 1."""
        return Capabilities(
            min_temperature=VLLM_TEMPERATURES[0],
            max_temperature=VLLM_TEMPERATURES[1],
            processed_scores=False,
            prefix_caching=self.described["prefix_caching"],
            max_length=self.max_length,
            own_limit=True,
            vocabulary=self.vocabulary,
            dtype=self.dtype,
        )

    def describe(self) -> dict[str, Any]:
        """Return version and settings."""
        return {"engine": self.name, "python": str(self.python), **self.described}

    def _generate(
        self, prompts: Sequence[Tokens], sampling: Sampling, *, max_new_tokens: int, seed: int, ignore_end: bool
    ) -> list[Sample]:
        if self.described["logprobs_mode"] != "processed_logprobs" and not (sampling.greedy or sampling.is_identity):
            raise EngineError(
                f"vLLM {self.described['vllm']} returns log-probabilities without temperature: use temperature 0 or 1"
            )
        if not ignore_end and not self.ends:
            folder = resolve_folder(self.path)
            self.ends = list(end_tokens(folder, read_config(folder)))
        return super()._generate(prompts, sampling, max_new_tokens=max_new_tokens, seed=seed, ignore_end=ignore_end)

    def _score(self, sequences: list[list[int]], sampling: Sampling, *, last: int | None) -> list[list[float]]:
        """Score sequences, see `Engine.score`."""
        if not sampling.is_identity:
            raise EngineError(f"vLLM of {self.python} scores existing tokens at temperature 1 only, not at {sampling}")
        return super()._score(sequences, sampling, last=last)

    _refit = Engine._refit


def interpreter_of(environment: str | Path) -> Path:
    """Return the interpreter of an environment, from its path or from the environment's directory.

    Raises:
        EngineUnavailableError: If there is none, or no file can have that path.
    """
    try:
        path = as_path(environment)
    except CheckpointError as error:
        raise EngineUnavailableError(f"no Python: {details_of(error.problems)}") from error
    candidates = (path / "bin" / "python", path / "Scripts" / "python.exe") if path.is_dir() else (path,)
    for candidate in candidates:
        if candidate.is_file():
            return candidate
    raise EngineUnavailableError(
        f"no Python at {environment}: expected an interpreter, or the directory of a virtual environment"
    )
