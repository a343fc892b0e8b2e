"""Names of weight files: in the directory, in an index, and in config.json, which also names the class that saved them.

transformers reads the file that `transformers_weights` names, and not model.safetensors. The class converts pickled
weights, which are never read: unpickling can run code.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from nrl_models.common.checkpoint.json_reading import read_object
from nrl_models.common.checkpoint.local_path import (
    CONFIG_NAME,
    INDEX_NAME,
    WEIGHTS_NAME,
    is_pickle,
    leaves,
    resume_checkpoint_in,
)
from nrl_models.common.upstream import class_of_transformers
from nrl_models.errors import CheckpointError, Problem, ProblemKind, listed, shown

KEY = "transformers_weights"

CONVERTIBLE = ("pytorch_model.bin", "pytorch_model.bin.index.json", INDEX_NAME)
"""Files from which transformers reads pickled weights."""


def named_weights(folder: Path) -> Any:
    """Return the weights file, or index of shards, in a checkpoint's configuration, unchecked; None without one."""
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


def checked_index(content: Mapping[str, Any], name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the `weight_map` and the `metadata` of an index of shards.

    Args:
        content: The parsed file.
        name: Name of the file, for the error.

    Raises:
        CheckpointError: If there is no `weight_map`, or it or the metadata is not an object.
    """
    weight_map, metadata = content.get("weight_map"), content.get("metadata")
    details = []
    if "weight_map" not in content:
        details.append(f"is not an index with a weight_map: its keys are {listed(content) or 'none'}")
    elif not isinstance(weight_map, dict):
        details.append(f"is not an index with a weight_map: that is {shown(weight_map)}, expected tensors and files")
    if metadata and not isinstance(metadata, dict):
        details.append(f"has the metadata {shown(metadata)}, expected an object")
    if details:
        advice = "download or save the index again, with the shards"
        problems = [Problem(ProblemKind.INDEX, name, detail, advice=advice) for detail in details]
        raise CheckpointError(f"cannot read {name}", problems)
    return weight_map or {}, metadata or {}


def name_inside(folder: Path, file: str) -> str | None:
    """Return a name in an index relative to the checkpoint's directory; None if it leads outside.

    transformers joins names with the directory. An absolute path, or one with `..`, is valid if it leads into it.
    """
    if not leaves(file):
        return os.path.normpath(file)
    if "\\" not in file:
        for root in (os.path.abspath(folder), os.path.realpath(folder)):
            path = os.path.join(root, file)
            name = os.path.relpath(path, root)
            # `..` after a link leads to the parent of the link's target.
            if not leaves(name) and os.path.realpath(path) == os.path.realpath(os.path.join(root, name)):
                return name
    return None


def movable_index(file: Path) -> dict[str, Any] | None:
    """Return an index of shards with names relative to its directory; None if its names are.

    A copy of the index in another directory would otherwise name the files of the first one.

    Args:
        file: The index of a checkpoint that was read, so its names lead into its directory.
    """
    content = read_object(file)
    weight_map, _ = checked_index(content, file.name)
    if not any(map(leaves, weight_map.values())):
        return None
    return content | {"weight_map": {key: name_inside(file.parent, name) for key, name in weight_map.items()}}


def without_weights(folder: Path, weights_name: str, index_name: str) -> Problem:
    """Return the problem of a checkpoint that has neither of two files. Lists the weights that it has."""
    detail = f"has neither {weights_name} nor {index_name}"
    if resume := resume_checkpoint_in(folder):
        return Problem(ProblemKind.FORMAT, str(folder), resume[0], advice=resume[1])
    names = sorted(path.name for path in folder.glob("*.safetensors*"))
    variants = sorted({match[1] or match[2] for match in map(_VARIANT.fullmatch, names) if match})
    if not names:
        return Problem(ProblemKind.FILE, str(folder), f"{detail}, and no other safetensors files")
    detail += f"; its safetensors files are {listed(names)}"
    advice = (
        [f"pass variant={' or '.join(map(repr, variants))} to from_pretrained (commands have no such option)"]
        if variants
        else []
    )
    advice += ["leave out variant"] if weights_name != WEIGHTS_NAME and {WEIGHTS_NAME, INDEX_NAME} & {*names} else []
    return Problem(ProblemKind.FILE, str(folder), detail, advice=", or ".join(advice))


_VARIANT = re.compile(r"model\.([^.]+)(?<!-of-\d{5})\.safetensors|model\.safetensors\.index\.([^.]+)\.json")
"""Names of weights with a variant, and of their index."""


_repositories: dict[Path, tuple[str, Callable[[], Iterable[str]]]] = {}
"""Downloaded directories: the name of the hub repository, and a function that lists the files."""


def note_repository(folder: Path, name: str, files: Callable[[], Iterable[str]]) -> None:
    """Record the hub repository of a downloaded directory, because pickled weights are not downloaded.

    Args:
        folder: The directory.
        name: The repository's name; empty if the directory is a subfolder or another revision.
        files: Function that returns the names of the files in the repository's directory.
    """
    _repositories[folder] = name, files


def pickles_in(folder: Path) -> list[str]:
    """Return the names of pickled weights in a directory, or in the hub repository from which it was downloaded."""
    if pickles := sorted(path.name for path in folder.glob("*") if is_pickle(path.name)):
        return pickles
    try:
        return sorted(filter(is_pickle, _repositories[folder][1]())) if folder in _repositories else []
    except Exception:  # any error of the network, for a cached repository: the caller reports the missing file
        return []


def only_pickles(folder: Path, pickles: Collection[str], variant: str | None) -> Problem:
    """Return the problem of a checkpoint without safetensors, which has the pickled weights `pickles`."""
    detail = f"only {', '.join(pickles)} found, and only safetensors are read: other formats can run code"
    return Problem(ProblemKind.FORMAT, str(folder), detail, advice=conversion_advice(folder, variant, pickles))


def conversion_advice(folder: Path, variant: str | None = None, pickles: Collection[str] = ()) -> str:
    """Return advice for converting a checkpoint: a command if transformers has the class that saved it.

    Other classes would drop its head, and save a new one that is not trained.

    Args:
        folder: Directory of the checkpoint.
        variant: Variant of the weight files.
        pickles: Files of its hub repository, if they are not in `folder`.
    """
    architecture = _architecture(folder)
    source, target = str(folder), str(folder)
    if folder in _repositories:
        source, target = _repositories[folder][0], _repositories[folder][0].rpartition("/")[2]
    is_convertible = variant is None and any((folder / name).is_file() or name in pickles for name in CONVERTIBLE)
    if not source or not is_convertible or class_of_transformers(architecture) is None:
        return "load the checkpoint with the class that saved it, and save it with save_pretrained as safetensors"
    code = f"import sys; from transformers import {architecture} as M; "
    code += "M.from_pretrained(sys.argv[1]).save_pretrained(sys.argv[2])"
    paths = shlex.join([source, f"{target}-safetensors"])
    return f'convert the checkpoint once with transformers: python -c "{code}" {paths}'


def _architecture(folder: Path) -> str:
    """Return the class that saved a checkpoint, according to its configuration; empty if it names none."""
    try:
        architectures = read_object(folder / CONFIG_NAME).get("architectures")
    except CheckpointError:  # reported when the configuration is read
        return ""
    first = architectures[0] if isinstance(architectures, list) and architectures else None
    return first if isinstance(first, str) else ""
