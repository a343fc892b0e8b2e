"""Settings of a run. Loading a family does not change transformers' own settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import MixtralConfig, PreTrainedModel

from nrl_models import AutoModelForCausalLM, registry
from nrl_models.common.backend import BackendConfig, should_combine
from nrl_models.errors import UnknownArgumentError


@pytest.mark.parametrize(
    ("backend", "expected"),
    [
        (BackendConfig(), {}),
        (BackendConfig(combine=False), {}),
        (BackendConfig(attn="eager"), {"attn_implementation": "eager"}),
        (
            BackendConfig(attn="sdpa", experts="batched_mm"),
            {"attn_implementation": "sdpa", "experts_implementation": "batched_mm"},
        ),
    ],
)
def test_only_set_values_are_passed(backend: BackendConfig, expected: dict[str, str]) -> None:
    assert backend.implementations() == expected


@pytest.mark.parametrize(
    ("theirs", "here"),
    [
        ({"attn": "sdpa", "linear": "torch"}, {"attn": "sdpa"}),
        ({"attn": "flex"}, {"attn": "flex_attention"}),
        ({"experts": "gmm", "dispatcher": "torch"}, {"experts": "grouped_mm"}),
        ({"experts": "torch", "enable_deepep": False, "rms_norm": "torch"}, {"experts": "eager"}),
    ],
)
def test_automodel_values_are_translated(theirs: dict[str, Any], here: dict[str, Any]) -> None:
    assert BackendConfig(**theirs) == BackendConfig(**here)
    assert BackendConfig(**theirs).implementations() == BackendConfig(**here).implementations()


def test_unsupported_automodel_values_raise_with_reason() -> None:
    with pytest.raises(UnknownArgumentError) as caught:
        BackendConfig(attn="te", linear="te", rms_norm="bogus", experts="te", dispatcher="deepep", enable_deepep=True)
    for message in (
        "attn='te': Tr",
        "linear='te': Tr",
        "rms_norm='bogus': expected",
        "experts='te': Tr",
        "(docs/scaling.md)",
    ):
        assert message in str(caught.value)
    assert str(caught.value).count("DeepEP's kernels") == 2


@pytest.mark.parametrize(
    ("combine", "device", "expected"),
    [
        (True, None, True),
        (True, "cpu", True),
        (False, "cuda", False),
        ("auto", None, False),
        ("auto", "cpu", False),
        ("auto", "cuda:1", False),
        ("auto", "meta", False),
    ],
)
def test_should_combine(combine: Any, device: str | None, expected: bool) -> None:
    assert should_combine(combine, None if device is None else torch.device(device)) is expected


@pytest.mark.parametrize("combine", ["Auto", 1, None, "true"])
def test_invalid_combine_values_raise(combine: Any, mixtral_config: MixtralConfig) -> None:
    with pytest.raises(ValueError, match="expected True, False or 'auto'"):
        should_combine(combine, None)
    with pytest.raises(ValueError, match="expected True, False or 'auto'"):
        AutoModelForCausalLM.from_config(mixtral_config, combine=combine)


@pytest.mark.parametrize("experts", ["eager", "batched_mm", "grouped_mm"])
def test_experts_implementation_is_applied(
    experts: str, mixtral_checkpoint: Path, mixtral: PreTrainedModel, input_ids: torch.Tensor
) -> None:
    model = AutoModelForCausalLM.from_pretrained(mixtral_checkpoint, backend=BackendConfig(experts=experts))
    assert model.config._experts_implementation == experts
    assert model.model.layers[0].mlp.experts.config._experts_implementation == experts
    with torch.no_grad():
        torch.testing.assert_close(model(input_ids).logits, mixtral(input_ids).logits, atol=1e-5, rtol=1e-5)


@pytest.fixture(params=[name for name in registry.MODEL_ARCH_MAPPING if registry.unmet_requirement(name) is None])
def model_class(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The class of each architecture, before transformers has cached any property of it or of its bases."""
    model_class = registry.model_class(request.param)
    for base in model_class.__mro__:
        for name in ("attn", "experts"):
            cached = f"_can_set_{name}_implementation_cached_value"
            if cached in vars(base):
                monkeypatch.delattr(base, cached)
    return model_class


def test_settable_kernels_match_reference(model_class: Any) -> None:
    # transformers reads it from the source of a class's module. Experts silently ran one by one, unless the Hugging
    # Face class had been checked before.
    can_set = model_class._can_set_attn_implementation(), model_class._can_set_experts_implementation()
    reference = model_class.reference_class()
    assert can_set == (reference._can_set_attn_implementation(), reference._can_set_experts_implementation())


@pytest.mark.parametrize("model_class", ["MixtralForCausalLM"], indirect=True)
def test_experts_default_to_grouped_mm(model_class: Any, mixtral_config: MixtralConfig) -> None:
    model = model_class.from_config(mixtral_config, device="meta")
    assert model.config._experts_implementation == "grouped_mm"
    assert model_class.from_config(model.config, device="meta").config._experts_implementation == "grouped_mm"
    model.set_experts_implementation("batched_mm")
    assert model.model.layers[0].mlp.experts.config._experts_implementation == "batched_mm"
