"""`inspect` and `plan` work on published configurations at full size on the meta device."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from published_configs import published, values_of
from test_published import SINCE, class_of
from transformers import PreTrainedConfig
from versions import since

from nrl_models import registry
from nrl_models.errors import ShardingError
from nrl_models.loading.read_config import read_config
from nrl_models.onboarding.estimate import estimate
from nrl_models.onboarding.estimate_step import Setting, default_seq_len
from nrl_models.onboarding.inspect import ModelKind, inspect
from nrl_models.testing.tiny import silent_transformers

LENGTH = 256
"""Sequence length, if the model supports it."""


def config_of(repository: str, folder: Path) -> PreTrainedConfig:
    registry.register_custom_configs()
    entry = published()[repository]
    (folder / "config.json").write_text(json.dumps(entry.config))
    return class_of(entry.auto, folder)[1]


UNPLANNED = ("has no tensor-parallel plan", "declares that it lacks tensor parallelism")
NO_EXPERT_PLAN = ("meta-llama/Llama-4-Scout-17B-16E-Instruct",)


def is_right(error: ShardingError, repository: str) -> bool:
    """Return True if the class has no plan, or each layer in the error has heads that tp does not divide."""
    if any(reason in str(error) for reason in UNPLANNED) or repository in NO_EXPERT_PLAN:
        return True
    heads = [re.match(r"has (\d+) heads .*, which tp=(\d+) does not divide", text.detail) for text in error.problems]
    return all(found is not None and int(found[1]) % int(found[2]) != 0 for found in heads)


@pytest.mark.long
@pytest.mark.parametrize(
    "repository", [pytest.param(name, marks=since(SINCE[name]) if name in SINCE else ()) for name in published()]
)
def test_inspect_and_plan_published_configs(repository: str, tmp_path: Path) -> None:
    with silent_transformers():
        config = config_of(repository, tmp_path)
        report = inspect(tmp_path)
        assert report.parameters > 1e6
        assert report.sizes["num_hidden_layers"]
        length = min(LENGTH, default_seq_len(config))
        complete = estimate(config, Setting({"fsdp": 8}, length))
        assert complete.total_parameters == pytest.approx(report.parameters, rel=0.01)
        assert complete.parameters >= report.parameters * 4 / 8
        assert complete.activations > 0
        meshes = [{"tp": 2}, {"fsdp": 2, "tp": 4}, *([{"ep": 2}] if ModelKind.MOE in report.kinds else [])]
        for mesh in meshes:
            try:
                divided = estimate(config, Setting(mesh, length))
            except ShardingError as error:
                assert is_right(error, repository), error  # noqa: PT017
                continue
            assert divided.total_parameters == complete.total_parameters
            assert divided.parameters < report.parameters * 4


@since("5.22")  # before, a configuration has no values for single layers, or a plan for layers that it cannot divide
def test_inspect_and_plan_with_per_layer_heads(tmp_path: Path) -> None:
    config = config_of("google/gemma-4-26B-A4B", tmp_path)
    assert inspect(tmp_path).sizes["num_key_value_heads"] == [8, 2]
    with pytest.raises(ShardingError, match=r"(?s)has 2 heads of 512 .*tp among \[1, 2\]") as error:
        estimate(config, Setting({"tp": 4}, LENGTH))
    assert len(error.value.problems) == 1


@pytest.mark.long
@since("5.22")
@pytest.mark.parametrize(
    ("repository", "billions", "degree"),
    [
        ("google/gemma-4-E2B-it", 5.1, 1),
        ("google/gemma-4-E4B-it", 8.0, 2),
        ("google/gemma-4-26B-A4B", 26.0, 2),
        ("google/gemma-4-31B-it", 31.0, 4),
    ],
)
def test_inspect_and_plan_sizes_of_gemma4(repository: str, billions: float, degree: int, tmp_path: Path) -> None:
    """`degree` is the number of key-value heads of the layers with the fewest."""
    (tmp_path / "config.json").write_text(json.dumps(values_of(repository)))
    config, report = read_config(tmp_path), inspect(tmp_path)
    assert report.parameters / 1e9 == pytest.approx(billions, rel=0.03)
    has_experts = ModelKind.MOE in report.kinds
    for mesh in ({"fsdp": 8}, {"fsdp": 2, "tp": degree}, *([{"ep": 2}] if has_experts else [])):
        assert estimate(config, Setting(mesh, LENGTH)).total_parameters == report.parameters
    for mesh, message in (
        ({"tp": 2 * degree}, "num_key_value_heads"),
        *([] if has_experts else [({"ep": 2}, "experts")]),
    ):
        with pytest.raises(ShardingError, match=message):
            estimate(config, Setting(mesh, LENGTH))


def test_sequence_longer_than_learned_positions_raises(tmp_path: Path) -> None:
    config = config_of("google-bert/bert-base-uncased", tmp_path)
    assert default_seq_len(config) == 512
    with pytest.raises(ShardingError, match="4,096 tokens, but the model's limit is 512"):
        estimate(config, Setting({"fsdp": 2}, 4096))
