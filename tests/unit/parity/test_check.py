from pathlib import Path

import pytest
import torch
from transformers import BertModel, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.models.mixtral.modeling_mixtral import MixtralAttention

from nrl_models import registry
from nrl_models.parity import check_parity
from nrl_models.testing.case import FamilyCase


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    FamilyCase(registry.model_class("MixtralForCausalLM")).reference().save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.long
def test_check_parity_passes(checkpoint: Path) -> None:
    report = check_parity(checkpoint)
    assert report.passed, [row for row in report.rows if not row.passed]
    checks = [row.check for row in report.rows]
    assert "level 3: logits, float32" in checks
    assert "level 3: logits, bfloat16" in checks
    assert "gradients, float32" in checks
    assert report.to_json()["verdict"] == "pass"


@pytest.mark.parametrize("vocabulary", [4, 16])
def test_small_vocabularies(tmp_path: Path, vocabulary: int) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, **sizes)).save_pretrained(tmp_path)
    report = check_parity(tmp_path)
    assert report.passed, [row for row in report.rows if not row.passed]


@pytest.mark.parametrize(("model_class", "output"), [(BertModel, "hidden states"), (GPT2LMHeadModel, "logits")])
def test_models_with_dropout_and_without_a_head(tmp_path: Path, model_class: type, output: str) -> None:
    """Published encoders and GPT-2 train with dropout. Both models need the same dropout to compare gradients."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128}
    config = model_class.config_class(**sizes)
    assert 0.1 in (getattr(config, "hidden_dropout_prob", 0), getattr(config, "resid_pdrop", 0))
    model_class(config).save_pretrained(tmp_path)
    report = check_parity(tmp_path)
    assert report.passed, [row for row in report.rows if not row.passed]
    checks = [row.check for row in report.rows]
    assert {f"level 3: {output}, float32", "gradients, float32", "gradients, bfloat16"} <= set(checks)


def test_broken_module_is_named(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A family whose rewrite computes other values fails, and the report names the module."""
    rewritten = registry.model_class("MixtralForCausalLM").rewrite_of(MixtralAttention)
    upstream = rewritten.forward

    def louder(self: torch.nn.Module, *args: object, **kwargs: object) -> tuple[torch.Tensor, object]:
        output, weights = upstream(self, *args, **kwargs)
        return output * 1.01, weights

    monkeypatch.setattr(rewritten, "forward", louder)
    report = check_parity(checkpoint, checks=("2", "3"))
    assert not report.passed
    assert report.to_json()["verdict"] == "fail"
    rows = {row.check: row for row in report.rows}
    assert not rows["level 2: MixtralAttention"].passed
    assert any("model.layers.0.self_attn" in row.measured for row in report.rows if row.check == "first divergence")


def test_only_selected_checks_run(checkpoint: Path) -> None:
    assert {row.check.split(":")[0] for row in check_parity(checkpoint, checks=("1",)).rows} == {"level 1"}


@pytest.mark.parametrize(
    ("options", "message"),
    [({"checks": ("4",)}, r"unknown checks \['4'\]"), ({"batch": 1}, "batch 1: expected at least 2")],
)
def test_invalid_arguments_raise(checkpoint: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_parity(checkpoint, **options)


def test_empty_report_does_not_pass() -> None:
    from nrl_models.parity import ParityReport

    assert not ParityReport("nothing was checked").passed
