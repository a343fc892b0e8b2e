"""Attention with soft-capping uses a kernel that applies the cap, even if transformers selects another one."""

from __future__ import annotations

import pytest
import torch
from transformers import Gemma2ForCausalLM, LlamaForCausalLM

from nrl_models.common.forward import soft_cap
from nrl_models.families.gemma2.model import Gemma2ForCausalLM as Ours
from nrl_models.testing.case import FamilyCase
from nrl_models.testing.tiny import tiny_config


def test_soft_cap_changes_logits_and_is_applied() -> None:
    case = FamilyCase(Ours)
    inputs = case.inputs()
    model, uncapped = case.model(), case.new_pair()[1]
    for layer in uncapped.model.layers:
        layer.self_attn.attn_logit_softcapping = None
    with torch.no_grad():
        capped = model(**inputs).logits
        assert (uncapped(**inputs).logits - capped).abs().max() > 1e-3
        model.set_attn_implementation("eager")
        torch.testing.assert_close(model(**inputs).logits, capped, rtol=0, atol=1e-5)


def test_drops_soft_cap_detects_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soft_cap, "sdpa_knows_soft_caps", lambda: False)
    monkeypatch.setattr(Gemma2ForCausalLM, "_supports_sdpa", True)
    assert soft_cap.drops_soft_cap(Gemma2ForCausalLM)
    assert not soft_cap.drops_soft_cap(LlamaForCausalLM)
    assert soft_cap.reference_attention(Ours.reference_class()) == {"attn_implementation": "eager"}
    later = Ours.__class__("Later", (Ours,), {"__module__": __name__})
    assert later._supports_sdpa is False


def test_soft_cap_support_in_transformers_disables_workaround(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soft_cap, "sdpa_knows_soft_caps", lambda: True)
    assert not soft_cap.drops_soft_cap(Gemma2ForCausalLM)
    assert soft_cap.reference_attention(LlamaForCausalLM) == {}


def test_default_attention_applies_soft_cap() -> None:
    config = tiny_config(Gemma2ForCausalLM.config_class)
    assert Ours.from_config(config).config._attn_implementation == "eager"
