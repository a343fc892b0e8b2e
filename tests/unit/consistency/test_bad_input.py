"""Failures of the command give a clear message and a nonzero exit code, and keep finished measurements."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from completions_server import Served, serving
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from nrl_models.cli import app
from nrl_models.engines.hf import HFEngine

Check = Callable[..., Result]

CELLS = ["--length", "16", "--length", "24", "--data", "dummy", "--mode", "greedy", "--batch", "2"]


@pytest.fixture
def server(checkpoint: Path) -> Iterator[tuple[str, Served]]:
    """The address of a server of the checkpoint, and the object that controls its behavior."""
    with serving(HFEngine.start(checkpoint, dtype=torch.float32)) as address_and_server:
        yield address_and_server


@pytest.fixture
def check(tmp_path: Path) -> Check:
    """Return a function that runs the command on a checkpoint and stores measurements in `kept`."""

    def check(path: Path, engine: str, *arguments: str) -> Result:
        base = ["consistency", str(path), "--engine", engine, "--trainer-dtype", "float32", "--new-tokens", "8"]
        return CliRunner().invoke(app, [*base, "--out", str(tmp_path / "kept"), *CELLS, *arguments])

    return check


def message(result: Result) -> str:
    """Return the printed message on one line."""
    assert "Traceback" not in result.output + result.stderr
    return " ".join((result.output + result.stderr).split())


def report(folder: Path) -> dict[str, Any]:
    """Read the saved report."""
    return json.loads((folder / "kept" / "report.json").read_text())


def fail_after(count: int, fails: Callable[[], None], served: Served) -> list[int]:
    """Make a server fail after this many requests. Returns the list of requests, which grows as they arrive."""
    complete, seen = served.complete, []

    def counted(body: dict[str, Any]) -> dict[str, Any]:
        seen.append(len(seen))
        if len(seen) == count:
            fails()
        return complete(body)

    served.complete = counted  # type: ignore[method-assign]
    return seen


def test_engine_start_error_does_not_block_later_runs(checkpoint: Path, check: Check, tmp_path: Path) -> None:
    result = check(checkpoint, "http://127.0.0.1:9")
    assert result.exit_code == 2
    assert not list((tmp_path / "kept").glob("*.safetensors"))
    result = check(checkpoint, "hf-generate", "--dtype", "float32")  # with other settings, as the message suggests
    assert result.exit_code == 0, message(result)
    result = check(checkpoint, "hf-generate", "--dtype", "bfloat16")
    assert result.exit_code == 2
    assert "holds measurements made with other settings" in message(result)


@pytest.mark.long
def test_measurements_survive_server_crash(
    checkpoint: Path, server: tuple[str, Served], check: Check, tmp_path: Path
) -> None:
    address, served = server
    seen = fail_after(2, lambda: setattr(served, "broken", True), served)  # the first cell: generated and scored
    result = check(checkpoint, address)
    assert result.exit_code == 2
    assert f"{address} cannot be reached, or has died" in message(result)
    assert f"Earlier measurements are in {tmp_path / 'kept'}" in message(result).replace("kept ; ", "kept; ")
    assert [cell["length"] for cell in report(tmp_path)["cells"]] == [16]
    served.broken = False
    result = check(checkpoint, address)
    assert result.exit_code == 0, message(result)
    assert len(seen) == 4  # only the second cell is measured again
    assert [cell["length"] for cell in report(tmp_path)["cells"]] == [16, 24]


@pytest.mark.long
def test_measurements_survive_server_timeout(
    checkpoint: Path, server: tuple[str, Served], check: Check, tmp_path: Path
) -> None:
    address, served = server
    fail_after(2, lambda: setattr(served, "delay", 4.0), served)
    result = check(checkpoint, address, "--engine-option", "timeout=2")
    assert result.exit_code == 2
    assert "did not answer within 2 s" in message(result)
    assert "timeout=SECONDS" in message(result)
    assert [cell["length"] for cell in report(tmp_path)["cells"]] == [16]


def test_server_without_logprobs_fails(
    checkpoint: Path, server: tuple[str, Served], check: Check, tmp_path: Path
) -> None:
    address, served = server
    served.change = lambda choice: choice | {"logprobs": None}
    result = check(checkpoint, address)
    assert result.exit_code == 2
    assert "it has to support `logprobs` in /v1/completions" in message(result)
    assert report(tmp_path)["error"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("value", "words"),
    [
        (None, "log-probabilities of decode are NaN"),
        (-9999.0, "log-probabilities of decode are infinite in the engine"),  # as vLLM's server reports infinity
    ],
)
def test_non_finite_logprobs_fail(
    checkpoint: Path, server: tuple[str, Served], check: Check, tmp_path: Path, value: float | None, words: str
) -> None:
    address, served = server

    def spoiled(choice: dict[str, Any]) -> dict[str, Any]:
        choice["logprobs"]["token_logprobs"][-1] = value
        return choice

    served.change = spoiled
    result = check(checkpoint, address)
    assert result.exit_code == 1
    assert words in message(result)
    assert "Log-probabilities of engine decode are not finite" in message(result)
    saved_report = report(tmp_path)
    assert saved_report["verdict"] == "fail"
    assert len(saved_report["cells"]) == 2


def test_prompts_longer_than_engine_limit_fail(checkpoint: Path, check: Check, tmp_path: Path) -> None:
    result = check(checkpoint, "hf-generate", "--engine-option", "max_length=20")
    assert result.exit_code == 2
    assert "sequence 0 has 16 tokens and 8 more are requested, and the engine's limit is 20" in message(result)
    assert [cell["length"] for cell in report(tmp_path)["cells"]] == [16]  # the length that fits


def test_tokenizer_of_another_model_fails(checkpoint: Path, check: Check, tmp_path: Path) -> None:
    path = shutil.copytree(checkpoint, tmp_path / "checkpoint")
    words = Tokenizer(models.WordLevel({f"word{index}": index for index in range(600)}, unk_token="word599"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(path)
    result = check(path, "hf-generate")
    assert result.exit_code == 2
    assert "the tokenizer returns token 599 ('word599'), but the model's embedding has 512 rows" in message(result)


def test_witness_equal_to_engine_fails(check: Check, checkpoint: Path) -> None:
    result = check(checkpoint, "hf-generate", "--witness", "hf-generate")
    assert result.exit_code == 2
    assert "the witness is also hf-generate: expected another engine than the one that is checked" in message(result)
    assert "unknown engine 'tgi'" in message(check(checkpoint, "hf-generate", "--witness", "tgi"))
