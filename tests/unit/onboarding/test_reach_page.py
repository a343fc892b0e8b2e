from __future__ import annotations

from pathlib import Path

import onboarding_reach as reach
import pytest
import transformers
from versions import since

from nrl_models.devtools.generated_tests import GeneratedTests


def outcomes(**failed: str) -> GeneratedTests:
    return GeneratedTests("", [], 1, {}, failed, {})


@since("5.15")
def test_says_what_became_of_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["LlamaForCausalLM", "Qwen2ForCausalLM", "Gemma2ForCausalLM", "MambaForCausalLM", "ZambaForCausalLM"]
    monkeypatch.setattr(reach, "decoders", lambda: [getattr(transformers, name) for name in names])
    monkeypatch.setattr(transformers.Gemma2ForCausalLM, "forward", lambda self, **_: 1 / 0)
    found = {"LlamaForCausalLM": outcomes(), "Qwen2ForCausalLM": outcomes(test_logits="differs")}
    counts = reach.write_reach(found, tmp_path / "reach.md")
    assert counts == {"green": 1, "red": 1, "not run": 1, "nothing to combine": 1, "not registered": 1}
    page = (tmp_path / "reach.md").read_text()
    assert "| LlamaForCausalLM | llama | green | q_proj + k_proj + v_proj; gate_proj + up_proj |" in page
    assert "| Gemma2ForCausalLM | gemma2 | not run |  | text: ZeroDivisionError" in page
    assert "3 have linears that read one input and can be combined; 1 of those (33%)" in page


def test_every_decoder_of_transformers_is_looked_at() -> None:
    found = [model_class.__name__ for model_class in reach.decoders()]
    assert len(found) == len(set(found)) > 200
    assert {"LlamaForCausalLM", "LlavaForConditionalGeneration", "GPT2LMHeadModel"} <= set(found)
