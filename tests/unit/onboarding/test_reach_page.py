from __future__ import annotations

import re
from pathlib import Path

import onboarding_reach as reach
import pytest
import transformers
from versions import since

from nrl_models import registry
from tools.coverage_pages.generated_tests import GeneratedTests


def outcomes(**failed: str) -> GeneratedTests:
    return GeneratedTests("", [], 1, {}, failed, {})


@since("5.15")
def test_page_lists_failures_with_reasons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["LlamaForCausalLM", "Qwen2ForCausalLM", "MusicgenForCausalLM", "MambaForCausalLM", "MllamaForCausalLM"]
    monkeypatch.setattr(reach, "decoders", lambda: [getattr(transformers, name) for name in names])
    monkeypatch.setattr(transformers.MusicgenForCausalLM, "forward", lambda self, **_: 1 / 0)
    passed = {"LlamaForCausalLM": outcomes(), "MambaForCausalLM": outcomes()}
    counts = reach.write_reach(passed | {"Qwen2ForCausalLM": outcomes(test_logits="differs")}, tmp_path / "reach.md")
    assert counts == {"green": 2, "red": 1, "not run": 1, "not registered": 1}
    page = (tmp_path / "reach.md").read_text()
    assert "Of 5 text-generating classes" in page
    assert "2 (40%) are registered" in page
    assert "| LlamaForCausalLM |" not in page
    assert "| MusicgenForCausalLM | writes audio codes" in page
    assert "text: ZeroDivisionError" in page
    assert re.search(r"\| MllamaForCausalLM \| its cross-attention .* \| q_proj \+ k_proj \+ v_proj; ", page)
    assert page.index("## Red") < page.index("| Qwen2ForCausalLM |") < page.index("## Not run")


def test_decoders_include_all_transformers_classes() -> None:
    names = [model_class.__name__ for model_class in reach.decoders()]
    assert len(names) == len(set(names)) > 200
    assert {"LlamaForCausalLM", "LlavaForConditionalGeneration", "GPT2LMHeadModel"} <= set(names)


@since("5.24")
def test_every_decoder_is_registered_or_has_a_reason() -> None:
    names = {model_class.__name__ for model_class in reach.decoders()}
    assert names - registry.MODEL_ARCH_MAPPING.keys() == reach.NOT_REGISTERED.keys()
