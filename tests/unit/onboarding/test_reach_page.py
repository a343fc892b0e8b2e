from __future__ import annotations

import json
from pathlib import Path

import onboarding_reach as reach
import pytest
import transformers

from nrl_models.devtools.coverage import CoverageError


def results(folder: Path, **outcomes: str) -> Path:
    file = folder / "results.json"
    content = [{"architecture": name, "check": "test_logits", "outcome": one} for name, one in outcomes.items()]
    file.write_text(json.dumps({"versions": {}, "results": content}))
    return file


def test_says_what_became_of_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["LlamaForCausalLM", "Qwen2ForCausalLM", "Gemma2ForCausalLM", "MambaForCausalLM", "ZambaForCausalLM"]
    monkeypatch.setattr(reach, "decoders", lambda: [getattr(transformers, name) for name in names])
    monkeypatch.setattr(transformers.Gemma2ForCausalLM, "forward", lambda self, **_: 1 / 0)
    file = results(tmp_path, LlamaForCausalLM="passed", Qwen2ForCausalLM="failed")
    counts = reach.write_reach(file, tmp_path / "reach.md")
    assert counts == {"green": 1, "red": 1, "not run": 1, "nothing to combine": 1, "not registered": 1}
    page = (tmp_path / "reach.md").read_text()
    assert "| LlamaForCausalLM | llama | green | q_proj + k_proj + v_proj; gate_proj + up_proj |" in page
    assert "| Gemma2ForCausalLM | gemma2 | not run |  | text: ZeroDivisionError" in page
    assert "3 have linears that read one input and can be combined; 1 of those (33%)" in page


def test_every_decoder_of_transformers_is_looked_at() -> None:
    found = [model_class.__name__ for model_class in reach.decoders()]
    assert len(found) == len(set(found)) > 200
    assert {"LlamaForCausalLM", "LlavaForConditionalGeneration", "GPT2LMHeadModel"} <= set(found)


def test_results_of_something_else_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CoverageError, match="is not what pytest --nrl-results writes"):
        reach.write_reach(tmp_path / "absent.json", tmp_path / "reach.md")
