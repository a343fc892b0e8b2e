"""`inspect` and `plan` on the tiny model of every architecture, parametrized like the suite."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedConfig, PreTrainedModel
from versions import needs

from nrl_models import registry
from nrl_models.common.forward.token_types import PER_TOKEN
from nrl_models.errors import ConfigurationError, ShardingError, UnknownArchitectureError
from nrl_models.inputs.audio import AUDIO
from nrl_models.inputs.images import PIXELS
from nrl_models.loading.read_config import read_config
from nrl_models.onboarding.estimate import estimate
from nrl_models.onboarding.estimate_step import Setting, _stub_experts, default_seq_len
from nrl_models.onboarding.inspect import ModelKind, inspect
from nrl_models.testing.case import FamilyCase
from tools.variants import case_of

LENGTH = 64

NO_AUTO_CLASS = ("EvollaForProteinText2Text",)

READ_VALUES = ("Blt", "DiffLlama", "Glm5Next", "JetMoe", "Qwen4Exp", "Xmod")
"""Starts of classes with an operation that torch does not run on meta."""

NO_BF16 = ("xLSTMForCausalLM",)
"""Classes that transformers cannot run in bf16."""


def is_explained(error: Exception, name: str) -> bool:
    """Return True if a mesh is impossible, or a class needs more than tokens on meta."""
    if isinstance(error, ShardingError) or name in NO_BF16:
        return True
    needs_inputs = any(f"needs {argument}" in str(error) for argument in (*PIXELS, *AUDIO, *PER_TOKEN))
    return needs_inputs or ("reads values" in str(error) and name.startswith(READ_VALUES))


def test_inspect_and_plan(family_case: FamilyCase, tmp_path: Path) -> None:
    registry.register_custom_configs()
    name, config = family_case.architecture, family_case.config
    config.architectures = [name]
    config.save_pretrained(tmp_path)
    if name in NO_AUTO_CLASS:
        with pytest.raises(UnknownArchitectureError, match="No auto class serves it"):
            inspect(tmp_path)
        return
    report, config = inspect(tmp_path), read_config(tmp_path)
    assert report.architecture == name
    assert report.parameters == family_case.reference().num_parameters()
    nbytes, problems = 4 * report.parameters, {}
    for mesh in ({"fsdp": 2}, {"tp": 2}, {"ep": 2}):
        try:
            found = estimate(config, Setting(mesh, min(LENGTH, default_seq_len(config))))
        except (ConfigurationError, ShardingError) as error:
            problems[next(iter(mesh))] = error
            continue
        assert found.total_parameters == report.parameters
        assert nbytes / 2 <= found.parameters < nbytes * 1.05  # parameters that two ranks cannot divide are padded
        assert found.activations > 0
        assert 0 <= found.gathered <= 2 * nbytes
        assert set(found.traffic) == set(mesh)
    assert not isinstance(problems.get("fsdp"), ShardingError)
    assert all(is_explained(error, name) for error in problems.values()), problems
    assert ModelKind.MOE in report.kinds or "ep" in problems


def expert_bytes(case: FamilyCase, **values: Any) -> list[int]:
    """Return the estimated activations of each stack of experts."""
    config: PreTrainedConfig = case.config
    for key, value in values.items():
        setattr(config.get_text_config(), key, value)
    with torch.device("meta"), ExitStack() as stack:
        model: PreTrainedModel = case.reference_class._from_config(config)
        return list(_stub_experts(model, Setting({"fsdp": 1}, LENGTH), stack).values())


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("MixtralForCausalLM", "num_experts_per_tok"),
        ("AriaTextForCausalLM", "moe_topk"),
        pytest.param("Gemma4ForCausalLM#26B-A4B", "top_k_experts", marks=needs("Gemma4ForCausalLM")),
        pytest.param("Gemma4ForConditionalGeneration#26B-A4B", "top_k_experts", marks=needs("Gemma4ForCausalLM")),
    ],
)
def test_activations_of_experts_follow_number_of_chosen_ones(name: str, key: str) -> None:
    case = case_of(name)
    one, two = expert_bytes(case, **{key: 1}), expert_bytes(case, **{key: 2})
    assert len(one) == case.config.get_text_config().num_hidden_layers
    assert two == [2 * nbytes for nbytes in one]


@pytest.mark.parametrize("name", ["Blip2ForConditionalGeneration", "MambaForCausalLM", "ZambaForCausalLM"])
def test_other_parameters_of_three_dimensions_are_not_experts(name: str) -> None:
    """Query tokens, convolutions, and projections of several heads."""
    assert expert_bytes(FamilyCase(registry.model_class(name))) == []


@needs("Gemma4ForCausalLM")
def test_positions_of_images_are_not_experts() -> None:
    assert expert_bytes(case_of("Gemma4ForConditionalGeneration#31B")) == []
