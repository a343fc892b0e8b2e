"""Two values of config.json about a checkpoint's weights: the file that has them, and the class that saved them.

transformers reads the file that `transformers_weights` names, and not model.safetensors. The class converts pickled
weights, which are never read: unpickling can run code.
"""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from nrl_models.common.checkpoint.json_reading import read_object
from nrl_models.common.checkpoint.local_path import CONFIG_NAME, INDEX_NAME, leaves
from nrl_models.common.upstream import class_of_transformers
from nrl_models.errors import CheckpointError, Problem, ProblemKind, shown

KEY = "transformers_weights"

CONVERTIBLE = ("pytorch_model.bin", "pytorch_model.bin.index.json", INDEX_NAME)
"""Files from which transformers reads pickled weights."""


def named_weights(folder: Path) -> Any:
    """The file, or index of shards, that a checkpoint's configuration names; None if it names none. Unchecked."""
    try:
        return read_object(folder / CONFIG_NAME).get(KEY)
    except (CheckpointError, OSError):  # reported when the configuration is read
        return None


def is_index(named: Any) -> bool:
    """Return True if the name is that of an index of shards."""
    return isinstance(named, str) and named.endswith(".safetensors.index.json")


def problem_of(named: Any) -> Problem | None:
    """Return the problem with a name of a weights file, or None."""
    if not isinstance(named, str):
        return Problem(ProblemKind.CONFIG, KEY, f"is {shown(named)}, expected the name of a file", CONFIG_NAME)
    if leaves(named):
        return Problem(ProblemKind.INDEX, KEY, f"names {named!r}, outside the checkpoint", CONFIG_NAME)
    if not named.endswith(".safetensors") and not is_index(named):
        detail, advice = f"names {named!r}, which is not safetensors", f"remove it, or set {KEY} to a safetensors file"
        return Problem(ProblemKind.FORMAT, KEY, detail, CONFIG_NAME, advice)
    return None


def conversion_advice(folder: Path, variant: str | None = None) -> str:
    """Return advice for converting a checkpoint: a command if transformers has the class that saved it.

    Other classes would drop its head, and save a new one that is not trained.
    """
    architecture = _architecture(folder)
    is_convertible = variant is None and any((folder / name).is_file() for name in CONVERTIBLE)
    if not is_convertible or class_of_transformers(architecture) is None:
        return "load the checkpoint with the class that saved it, and save it with save_pretrained as safetensors"
    code = f"import sys; from transformers import {architecture} as M; "
    code += "M.from_pretrained(sys.argv[1]).save_pretrained(sys.argv[2])"
    paths = shlex.join([str(folder), f"{folder}-safetensors"])
    return f'convert the checkpoint once with transformers: python -c "{code}" {paths}'


def _architecture(folder: Path) -> str:
    """Return the class that saved a checkpoint, according to its configuration; empty if it names none."""
    try:
        architectures = read_object(folder / CONFIG_NAME).get("architectures")
    except CheckpointError:  # reported when the configuration is read
        return ""
    first = architectures[0] if isinstance(architectures, list) and architectures else None
    return first if isinstance(first, str) else ""
