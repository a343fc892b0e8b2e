"""The manifest of resume checkpoints: values are read as written, or raise an error."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from nrl_models.distributed.resume_checkpoints import manifest
from nrl_models.distributed.resume_checkpoints.manifest import (
    Manifest,
    OptimizerFacts,
    ParameterGroup,
    States,
    WrittenFile,
    read_manifest,
)
from nrl_models.distributed.resume_checkpoints.scalars import Scalar
from nrl_models.errors import CheckpointError

NAMES = ("config.json", "weights-00000-00000.safetensors", "optimizer-00000-00000.safetensors")
WRITTEN = Manifest(
    {name: WrittenFile(number + 7, f"{number:032x}") for number, name in enumerate(NAMES)},
    {"step": 3, "loss": 0.1, "data": {"epoch": None, "files": ["ä", "\x1b"]}},
    OptimizerFacts(
        [ParameterGroup({"lr": 1e-3, "betas": [0.9, 0.999], "fused": None, "amsgrad": False}, ["a", "b"])],
        {"a": States({"step": Scalar("torch.float32", 2.0)}, ["exp_avg", "exp_avg_sq"])},
    ),
)
OTHERS = (None, True, -1, 10**400, 1.5, "x", "../x", [], {}, [None], {"x": None}, [[[]]])


def json_paths(content: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Return the path of each value in JSON."""
    yield path
    if isinstance(content, (dict, list)):
        for key in content if isinstance(content, dict) else range(len(content)):
            yield from json_paths(content[key], (*path, key))


def changed(path: tuple[Any, ...], value: Any) -> bytes:
    """Return the manifest with another value at a path, or without the key for `...`. The hash is correct."""
    content = {"": copy.deepcopy(CONTENT)}
    inner: Any = content
    for key in ("", *path)[:-1]:
        inner = inner[key]
    last = ("", *path)[-1]
    if value is ...:
        del inner[last]
    else:
        inner[last] = value
    return manifest._rendered(content[""])


CONTENT = json.loads(WRITTEN.rendered())["manifest"]


def test_manifest_round_trip(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_bytes(WRITTEN.rendered())
    assert read_manifest(tmp_path) == WRITTEN
    assert WRITTEN.files_of(manifest.StatePart.OPTIMIZER) == ["optimizer-00000-00000.safetensors"]


def test_bit_flip_or_truncation_raises() -> None:
    data = WRITTEN.rendered()
    others = [data[:length] for length in range(len(data))] + [data + b"\n", data + b" "]
    for position in range(len(data)):
        for bit in range(8):
            others.append(data[:position] + bytes([data[position] ^ 1 << bit]) + data[position + 1 :])
    for other in others:
        with pytest.raises(CheckpointError):
            Manifest.parse(other)


@pytest.mark.parametrize("value", [*OTHERS, ...], ids=lambda value: repr(value)[:9])
def test_value_of_wrong_type_or_range_raises(value: Any) -> None:
    accepted = []
    for path in json_paths(CONTENT):
        if value is ... and not path:
            continue
        try:
            parsed = Manifest.parse(changed(path, value))
        except CheckpointError:
            continue
        assert json.loads(parsed.rendered())["manifest"] == json.loads(changed(path, value))["manifest"]
        accepted.append(path)
    assert accepted == [path for path in json_paths(CONTENT) if is_valid_at(path, value)]


def is_valid_at(path: tuple[Any, ...], value: Any) -> bool:
    """Return True if one of `OTHERS`, or no value, is valid at a path."""
    is_plain = value in (None, True, -1, 1.5, "x", "../x")
    match path:
        case ("progress", key, *_):
            return key != "step" or value is ...
        case ("progress",):
            return isinstance(value, dict)
        case ("optimizer",):
            return value is None
        case ("optimizer", "groups", 0, "options", "betas", _):
            return is_plain or value is ...
        case ("optimizer", "groups", 0, "options", _):
            return is_plain or value in ([], [None], ...)
        case ("optimizer", "groups", 0, "options"):
            return isinstance(value, dict)
        case ("optimizer", "groups", 0, "parameters", 1) | ("optimizer", "states", "a", "tensors", _):
            return isinstance(value, str) or value is ...
        case ("optimizer", "states", "a", "scalars", "step"):
            return value is ...
        case ("optimizer", "states", "a", "scalars", "step", "value"):
            return value in (-1, 1.5)
        case ("files", _) | ("optimizer", "states", "a"):
            return value is ...
        case ("files",) | ("optimizer", "states") | ("optimizer", "states", "a", "scalars"):
            return value == {}
        case ("optimizer", "states", "a", "tensors"):
            return value == []
    return False


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("int", 1.5),
        ("int", True),
        ("bool", 1),
        ("float", "x"),
        ("float", 10**400),
        ("complex", 1.0),
        ("torch.int8", 128),
        ("torch.bool", 0),
        ("torch.float32", True),
        ("torch.nowhere", 1.0),
    ],
)
def test_scalar_not_representable_in_dtype_raises(kind: str, value: Any) -> None:
    with pytest.raises(CheckpointError, match="expected a finite number of its type") as caught:
        Manifest.parse(changed(("optimizer", "states", "a", "scalars", "step"), {"type": kind, "value": value}))
    assert [problem.subject for problem in caught.value.problems] == ["optimizer.states.a.scalars.step"]


def test_format_1_scalars_are_fp32_tensors() -> None:
    content = copy.deepcopy(CONTENT)
    content["optimizer"]["states"]["a"]["scalars"] = {"step": 2.0}
    content["format"] = 1
    assert Manifest.parse(manifest._rendered(content)) == WRITTEN


@pytest.mark.parametrize(
    ("progress", "subject"),
    [
        ({"seen": {0: 5}}, "progress.seen"),
        ({"a": [1, (2, {None: 3})]}, "progress.a[1][1]"),
        ({True: 1}, "progress"),
        ({"file": WrittenFile(1, "")}, "progress.file"),
        ([1, 2], "progress"),
    ],
    ids=repr,
)
def test_progress_not_preserved_by_json_raises(progress: Any, subject: str) -> None:
    with pytest.raises(CheckpointError, match="cannot save this in a checkpoint") as caught:
        Manifest({}, progress, None).checked()
    assert [problem.subject for problem in caught.value.problems] == [subject]


def test_progress_tuples_become_lists() -> None:
    progress = {"shape": (1, (2, 0.1)), "done": True, "next": None}
    assert Manifest({}, progress, None).checked().progress == {"shape": [1, [2, 0.1]], "done": True, "next": None}


def test_error_lists_all_problems() -> None:
    content = copy.deepcopy(CONTENT)
    content["progress"] = None
    content["files"]["config.json"]["bytes"] = "7"
    del content["optimizer"]["groups"][0]["options"]
    content["x"] = 1
    with pytest.raises(CheckpointError) as caught:
        Manifest.parse(manifest._rendered(content))
    assert sorted(problem.subject for problem in caught.value.problems) == [
        "files.config.json.bytes",
        "optimizer.groups[0].options",
        "progress",
        "x",
    ]


@pytest.mark.parametrize(
    "data",
    [b"", b"null", b"[]", b"{}", b"\xff", b"[" * 10**6, b'{"manifest": NaN}', b"1" * 5000],
    ids=lambda data: repr(data)[:9],
)
def test_invalid_manifest_raises_checkpoint_error(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "manifest.json").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        read_manifest(tmp_path)


def test_missing_manifest_or_directory_raises_checkpoint_error(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"manifest\.json: cannot be read"):
            read_manifest(tmp_path)
        (tmp_path / "manifest.json").mkdir(exist_ok=True)
