"""Image files as prompts, and `nrl-models consistency --images`."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoProcessor
from typer.testing import CliRunner

from nrl_models.cli import app
from nrl_models.consistency.vision import image_check
from nrl_models.consistency.vision.image_check import ImageComparison, ImageFault
from nrl_models.consistency.vision.image_files import file_prompt
from nrl_models.logprobs import Sampling


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Two images, one with an alpha channel."""
    names = [tmp_path / "small.png", tmp_path / "wide.png"]
    Image.new("RGB", (4, 4)).save(names[0])
    Image.new("RGBA", (8, 4)).save(names[1])
    return names


class Templated:
    chat_template = "not empty"

    def apply_chat_template(self, messages: list[dict[str, Any]], **options: Any) -> str:
        assert options == {"add_generation_prompt": True, "tokenize": False}
        return json.dumps(messages)


def test_prompt_with_chat_template(files: list[Path]) -> None:
    prompt = file_prompt(Templated(), files[1], "Why?")
    assert json.loads(prompt.text) == [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Why?"}]}
    ]
    assert [(image.size, image.mode) for image in prompt.images] == [((8, 4), "RGB")]


@pytest.mark.parametrize(
    ("attributes", "text"),
    [
        ({"image_token": "<image>", "chat_template": None}, "<image> Why?"),
        ({"image_token": "<image>", "image_placeholder_token": "<here>"}, "<here> Why?"),
        ({}, "Why?"),
    ],
)
def test_prompt_without_chat_template(files: list[Path], attributes: dict[str, Any], text: str) -> None:
    assert file_prompt(SimpleNamespace(**attributes), files[0], "Why?").text == text


@pytest.fixture
def check_arguments(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Record the arguments of `check_images`. Its result for the second image is a failure."""
    calls: dict[str, Any] = {}

    def check_images(path: Path, prompts: list[Any], **options: Any) -> list[ImageComparison]:
        calls.update(options, texts=[prompt.text for prompt in prompts])
        sizes = [tuple(image.size for image in prompt.images) for prompt in prompts]
        outcomes = [(1.0, 1.0, 1.05, None), (float("inf"), float("inf"), 1.05, ImageFault.PROCESSOR)]
        return [ImageComparison(size, 9, 8, *outcome) for size, outcome in zip(sizes, outcomes, strict=False)]

    monkeypatch.setattr(image_check, "check_images", check_images)
    monkeypatch.setattr(AutoProcessor, "from_pretrained", lambda folder, **_: SimpleNamespace(image_token="<image>"))
    return calls


def test_command_compares_image_files(
    checkpoint: Path, files: list[Path], tmp_path: Path, check_arguments: dict[str, Any]
) -> None:
    report = tmp_path / "report.json"
    arguments = ["consistency", str(checkpoint), "--images", str(files[0]), "--json", str(report)]
    passed = CliRunner().invoke(app, [*arguments, "--image-prompt", "Why?", "--new-tokens", "8", "--top-p", "1"])
    assert passed.exit_code == 0, passed.output
    assert check_arguments == {
        "texts": ["<image> Why?"],
        "sampling": Sampling(0.8, 0, 1.0),
        "dtype": torch.float32,
        "threshold": 1.05,
        "noise_factor": 1.5,
        "new_tokens": 8,
        "seed": 0,
        "engine_options": {},
    }
    assert json.loads(report.read_text())["verdict"] == "pass"
    assert "small.png" in passed.output


def test_command_fails_and_names_wrong_component(
    checkpoint: Path, files: list[Path], tmp_path: Path, check_arguments: dict[str, Any]
) -> None:
    report = tmp_path / "report.json"
    images = [argument for file in files for argument in ("--images", str(file))]
    arguments = ["consistency", str(checkpoint), *images, "--json", str(report), "--dtype", "bf16"]
    failed = CliRunner().invoke(app, [*arguments, "--engine-option", "max_length=64"], env={"COLUMNS": "160"})
    assert failed.exit_code == 1, failed.output
    assert "processor" in failed.output
    assert check_arguments["dtype"] == torch.bfloat16
    assert check_arguments["engine_options"] == {"max_length": 64}
    assert check_arguments["texts"] == ["<image> Describe the image."] * 2
    content = json.loads(report.read_text())
    assert [image["verdict"] for image in content["images"]] == ["pass", "fail"]
    assert content["images"][1] | {"file": ""} == {
        "file": "",
        "verdict": "fail",
        "value": None,
        "unit": "token_mult_prob_error",
        "sizes": [[8, 4]],
        "prompt_tokens": 9,
        "new_tokens": 8,
        "decode": None,
        "prefill": None,
        "bound": 1.05,
        "fault": "processor",
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--images", "small.png", "--length", "8"], "--length does not apply to --images"),
        (["--images", "small.png", "--witness", "mlx"], "--witness does not apply to --images"),
        (["--images", "small.png", "--engine", "hf-generate"], "--images needs --engine vllm"),
        (["--images", "small.png", "--engine-option", "python=/x"], "without --engine-option python"),
        (["--images", "missing.png"], "no such file"),
        (["--image-prompt", "Why?"], "--image-prompt needs --images"),
    ],
)
def test_incompatible_options_fail(
    checkpoint: Path,
    files: list[Path],
    arguments: list[str],
    message: str,
    check_arguments: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(files[0].parent)
    result = CliRunner().invoke(app, ["consistency", str(checkpoint), *arguments], env={"COLUMNS": "300"})
    assert result.exit_code == 2
    assert message in " ".join((result.output + result.stderr).split())
    assert not check_arguments


def test_invalid_image_error_names_file(checkpoint: Path, tmp_path: Path, check_arguments: dict[str, Any]) -> None:
    (tmp_path / "text.png").write_text("no image")
    result = CliRunner().invoke(app, ["consistency", str(checkpoint), "--images", str(tmp_path / "text.png")])
    assert result.exit_code == 2
    assert "text.png" in result.output + result.stderr
