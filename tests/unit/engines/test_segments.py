"""Shared memory: reading from another process, errors, and cleanup after a process dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nrl_models.common.checkpoint.stored_tensors import DTYPES
from nrl_models.engines.transfer.segments import Segment
from nrl_models.engines.transfer.updates import Update, Weights, made_of
from nrl_models.errors import EngineError

TENSORS = {
    "a": torch.arange(10.0),
    "b": torch.randn(3, 4).bfloat16().T,
    "c": torch.tensor(3, dtype=torch.uint8),
    "d": torch.empty(0, 5),
}

WRITE = """
import json, sys, torch
from nrl_models.engines.transfer.segments import Segment
print(json.dumps(Segment.write({"a": torch.arange(10.0)}).to_json()), flush=True)
sys.stdin.readline()
"""


def test_segment_round_trip() -> None:
    segment = Segment.write(TENSORS, {"key": "value"})
    try:
        tensors, text = Segment.of_json(json.loads(json.dumps(segment.to_json()))).read()
    finally:
        segment.close()
    assert text == {"key": "value"}
    torch.testing.assert_close(tensors, TENSORS, rtol=0, atol=0)
    tensors["a"][0] = 5.0  # changes this process only, and outlives the segment
    assert tensors["a"].sum() == 50


def test_segment_round_trip_for_every_dtype() -> None:
    bits = torch.arange(48, dtype=torch.uint8) % 2
    tensors = {
        f"{number}{end}": bits.view(dtype) if end else bits.view(dtype)[:1]
        for number, dtype in enumerate(DTYPES.values())
        for end in ("", "b")
    }
    segment = Segment.write(tensors)
    try:
        read_tensors, _ = segment.read()
        assert segment.nbytes == os.fstat(segment.descriptor).st_size
    finally:
        segment.close()
    assert read_tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read_tensors[name].dtype == tensor.dtype
        assert read_tensors[name].shape == tensor.shape
        assert torch.equal(read_tensors[name].view(torch.uint8), tensor.view(torch.uint8))
        assert read_tensors[name].data_ptr() % tensor.itemsize == 0


def test_unsupported_dtype_raises() -> None:
    with pytest.raises(EngineError, match=r"a is torch\.complex128, which safetensors cannot store"):
        Segment.write({"a": torch.zeros(2, dtype=torch.complex128)})


def test_segment_is_read_only() -> None:
    segment = Segment.write(TENSORS)
    try:
        with pytest.raises(PermissionError):
            os.truncate(segment.descriptor, 5)
        with pytest.raises(PermissionError):
            os.pwrite(segment.descriptor, b"x", 20)
    finally:
        segment.close()


@pytest.mark.long
def test_segment_after_writer_is_killed() -> None:
    """Processes that mapped the segment keep it. No other process can open it, because it has no name on disk."""
    writer = subprocess.Popen([sys.executable, "-c", WRITE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    segment = Segment.of_json(json.loads(writer.stdout.readline()))
    tensors, _ = segment.read()
    writer.send_signal(signal.SIGKILL)
    writer.communicate()
    assert tensors["a"].sum() == 45
    with pytest.raises(EngineError, match="the trainer has to be alive"):
        segment.read()


def test_file_that_is_not_a_segment_raises(tmp_path: Path) -> None:
    segment = Segment.write(TENSORS)
    try:
        with pytest.raises(EngineError, match="another trainer's shared memory"):
            replace(segment, token="0" * 32).read()
    finally:
        segment.close()
    with pytest.raises(EngineError, match="cannot be opened"):
        segment.read()
    file = tmp_path / "file"
    file.write_bytes(b"secret")
    os.mkfifo(tmp_path / "pipe")
    for path in (file, tmp_path / "pipe"):  # opening a pipe would block until a writer opens it
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        try:
            with pytest.raises(EngineError, match="is not a trainer's shared memory") as caught:
                Segment(os.getpid(), handle, "0" * 32, 6).read()
            assert "secret" not in str(caught.value)
        finally:
            os.close(handle)


@pytest.mark.parametrize(
    "value",
    [None, [], {}, {"pid": 1}, {"pid": "1", "descriptor": 1, "token": "", "nbytes": 0}]
    + [{"pid": pid, "descriptor": 1, "token": token, "nbytes": 0} for pid, token in ((-1, "a"), (True, "a"), (1, "ä"))],
)
def test_invalid_segment_json_raises(value: object) -> None:
    with pytest.raises(EngineError, match="is not a segment of shared memory: expected pid, descriptor, token, nbytes"):
        Segment.of_json(value)


@pytest.mark.parametrize(
    ("head", "problem"),
    [(torch.ones(2, 3), ""), (torch.zeros(2, 3), "lm_head.weight is"), (torch.ones(2, 4), "lm_head.weight is")],
    ids=["equal", "other values", "other shape"],
)
@pytest.mark.parametrize("is_first", [True, False], ids=["removed", "added"])
def test_tied_head_added_or_removed_between_versions(is_first: bool, head: torch.Tensor, problem: str) -> None:
    """An engine that ties the head to the embeddings accepts an equal head. Updates without it recover the engine."""
    tied = {"embed_tokens.weight": torch.ones(2, 3)}
    both = {**tied, "lm_head.weight": head}
    before, after = (both, tied) if is_first else (tied, both)
    segment = Segment.write(after)
    try:
        update = Update("2", Weights.of("2", after).digest, (segment,))
        if problem:
            with pytest.raises(EngineError, match=problem):
                made_of(update, Weights.of("1", before))
        else:
            assert made_of(update, Weights.of("1", before))[1] == after.keys()
    finally:
        segment.close()
