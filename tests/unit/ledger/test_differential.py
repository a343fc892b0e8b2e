"""Changing a key in the model and its reference finds deviations of a family, and the effect of each key."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from planted_bugs import Nova, NovaForCausalLM
from torch import nn
from transformers import LlamaConfig, PreTrainedConfig
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama as hf

from nrl_models.family import FamilyModel
from nrl_models.testing.case import FamilyCase
from nrl_models.testing.tiny import tiny_config
from tools.ledger.differential import Differential, Finding, keys_that_are_read, ledger_keys
from tools.ledger.ledger import KeyKind
from tools.ledger.perturbations import other_values, perturbed
from tools.ledger.record import ledger_of


class FixedNorm(hf.LlamaRMSNorm):
    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        return self.weight * hidden_states * torch.rsqrt(variance + 1e-6)


class FixedNormForCausalLM(Nova, hf.LlamaForCausalLM):
    """Correct only at the default epsilon."""

    rewrites = Nova.rewrites | {hf.LlamaRMSNorm: FixedNorm}


class SiluMLP(hf.LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(nn.functional.silu(self.gate_proj(x)) * self.up_proj(x))


class SiluForCausalLM(Nova, hf.LlamaForCausalLM):
    """Correct only at the default activation."""

    rewrites = {hf.LlamaMLP: SiluMLP}


class NoDropoutAttention(hf.LlamaAttention):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.attention_dropout = 0.0
        return super().forward(*args, **kwargs)


class NoDropoutForCausalLM(Nova, hf.LlamaForCausalLM):
    """Correct without dropout. The bug only shows in training."""

    rewrites = {hf.LlamaAttention: NoDropoutAttention}


class FixedScaleForCausalLM(Nova, hf.LlamaForCausalLM):
    """Correct only at the default initializer range."""

    def __init__(self, config: LlamaConfig, **options: Any) -> None:
        config.initializer_range = 0.06
        super().__init__(config, **options)


class RefusingForCausalLM(Nova, hf.LlamaForCausalLM):
    """Raises an error for a value that transformers supports."""

    def __init__(self, config: LlamaConfig, **options: Any) -> None:
        if config.mlp_bias:
            raise ValueError("no biases")
        super().__init__(config, **options)


class SilentModel(hf.LlamaModel):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs | {"output_hidden_states": False})


class SilentForCausalLM(Nova, hf.LlamaForCausalLM):
    """Never returns hidden states."""

    rewrites = Nova.rewrites | {hf.LlamaModel: SilentModel}


class EagerForCausalLM(Nova, hf.LlamaForCausalLM):
    """Uses a key that transformers does not read."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        result = super().forward(*args, **kwargs)
        result.logits = result.logits * (1 + self.config.eos_token_id % 2)
        return result


BUGS = {
    FixedNormForCausalLM: ("rms_norm_eps", "outputs", "differs by"),
    SiluForCausalLM: ("hidden_act", "outputs", "differs by"),
    NoDropoutForCausalLM: ("attention_dropout", "training", "training: "),
    FixedScaleForCausalLM: ("initializer_range", "weights", "other new weights"),
    RefusingForCausalLM: ("mlp_bias", "shapes", "refused with 'build: ValueError: no biases'"),
    EagerForCausalLM: ("eos_token_id", KeyKind.INERT, "differs by"),
    SilentForCausalLM: ("output_hidden_states", "outputs", "on one side only"),
}


@pytest.mark.long
@pytest.mark.parametrize(("model_class", "expected"), BUGS.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_key_with_wrong_effect_is_detected(model_class: type[FamilyModel], expected: tuple[str, str, str]) -> None:
    key, kind, difference = expected
    assert Differential(FamilyCase(NovaForCausalLM)).try_key(key) == Finding(kind)
    departing = Differential(FamilyCase(model_class)).try_key(key)
    assert departing.kind == kind
    assert difference in departing.difference


@pytest.mark.long
def test_ledger_contains_every_key_and_limits() -> None:
    class LimitedForCausalLM(RefusingForCausalLM):
        config_values = {"mlp_bias": (False,)}

    case = FamilyCase(LimitedForCausalLM)
    ledger = ledger_of(case)
    assert list(ledger.kinds) == ledger_keys(case.config)
    assert dict(ledger.supported) == {"mlp_bias": False}
    assert not ledger.departures
    assert ledger.kinds["eos_token_id"] == KeyKind.INERT
    assert ledger_of(FamilyCase(RefusingForCausalLM)).departures.keys() == {"mlp_bias"}


class GatedConfig(LlamaConfig):
    model_type = "gated"
    scale_logits: bool = False
    logit_scale: float = 1.0


class GatedModel(hf.LlamaForCausalLM):
    config_class = GatedConfig
    config: GatedConfig

    def forward(self, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = super().forward(input_ids, *args, **kwargs)
        if self.config.scale_logits:
            result.logits = (result.logits + 1) * self.config.logit_scale
        return result


class GatedForCausalLM(Nova, GatedModel):
    """Reads its second key only if the first is set."""


def test_key_read_only_after_other_change() -> None:
    findings = Differential(FamilyCase(GatedForCausalLM)).run()
    assert findings["scale_logits"] == Finding("outputs")
    assert findings["logit_scale"] == Finding("outputs")


def test_survey_finds_inert_keys() -> None:
    differential = Differential(FamilyCase(NovaForCausalLM))
    surveyed, findings = differential.survey(), differential.run()
    assert set(surveyed.values()) == {KeyKind.INERT, KeyKind.UNTRIED}
    assert {path for path, kind in surveyed.items() if kind == KeyKind.INERT} <= {
        path for path, inert in findings.items() if inert.kind == KeyKind.INERT
    }


def test_keys_that_are_read() -> None:
    config = tiny_config(LlamaConfig)
    with keys_that_are_read() as read:
        assert config.rms_norm_eps
    assert config.hidden_act
    assert ("LlamaConfig", "rms_norm_eps") in read
    assert ("LlamaConfig", "hidden_act") not in read


def test_other_values_differ_and_keep_type() -> None:
    assert other_values(LlamaConfig, "mlp_bias", False) == [True]
    assert other_values(LlamaConfig, "hidden_act", "silu") == ["relu", "gelu"]
    assert other_values(LlamaConfig, "num_attention_heads", 8)[:2] == [4, 16]
    assert other_values(LlamaConfig, "rms_norm_eps", 1e-6) == [0.1]
    assert other_values(LlamaConfig, "problem_type", None)[0] == "regression"
    assert {type(other_value) for other_value in other_values(LlamaConfig, "head_dim", None)} == {int}


def test_lists_follow_number_of_layers() -> None:
    config: PreTrainedConfig = tiny_config(modeling_gpt_oss.GptOssConfig)
    longer = next(perturbed(config, "num_hidden_layers"))
    assert isinstance(longer, PreTrainedConfig)
    assert longer.num_hidden_layers == len(longer.layer_types) == len(config.layer_types) + 1
