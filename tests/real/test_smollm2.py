"""The pretrained chat model SmolLM2-135M-Instruct passes the checks that random models pass."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM as HFAutoModelForCausalLM
from transformers import AutoTokenizer
from typer.testing import CliRunner

from nrl_models import AutoModelForCausalLM
from nrl_models.cli import app
from nrl_models.common.gguf.gguf_tables import upstream_source
from nrl_models.common.projections import report
from tests.unit.checkpoints import assert_same, stored

pytestmark = pytest.mark.xdist_group("smollm2")  # load it in one process only

MESSAGES = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [{"role": "user", "content": "Name three colors of the rainbow, in order."}],
]


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Any:
    return AutoTokenizer.from_pretrained(smollm2, padding_side="left")


def test_gguf_weights_match_transformers_dequantization(smollm2: Path, smollm2_gguf: Path) -> None:
    source, keywords = upstream_source(smollm2_gguf)
    expected = HFAutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **keywords).state_dict()
    assert_same(AutoModelForCausalLM.from_pretrained(smollm2_gguf).state_dict(), expected)
    in_bf16 = {name: tensor.bfloat16() for name, tensor in expected.items() if name != "lm_head.weight"}
    assert_same(stored(smollm2), in_bf16)  # the output of `convert`
    assert len(in_bf16) == 272


def test_demo_with_real_model(smollm2: Path, tmp_path: Path) -> None:
    """`nrl-models demo --real` checks parity at every level, groups, completions, saving and log-probabilities."""
    result = CliRunner().invoke(app, ["demo", "--real", "--out", str(tmp_path), "--json", str(tmp_path / "out.json")])
    assert result.exit_code == 0, result.output
    checks = {check["check"]: check for check in json.loads((tmp_path / "out.json").read_text())["checks"]}
    assert all(check["passed"] for check in checks.values())
    for name in ("level 1", "level 2", "level 3: logits, float32", "level 3: logits, bfloat16", "gradients"):
        assert any(check.startswith(name) for check in checks), name
    assert checks["loaded through the registry"]["measured"] == "272 tensors from 1 shard"
    assert checks["generated text"]["measured"] == "3 of 3 equal"


def test_batched_chat_generation_matches_transformers(smollm2: Path, tokenizer: Any) -> None:
    """Sample completions of prompts with several lengths, padded on the left."""
    options = {"add_generation_prompt": True, "padding": True, "return_tensors": "pt", "return_dict": True}
    chats = tokenizer.apply_chat_template(MESSAGES, **options)
    assert chats["attention_mask"].min() == 0
    generated = []
    for load in (AutoModelForCausalLM, HFAutoModelForCausalLM):
        model: Any = load.from_pretrained(smollm2, dtype=torch.float32)
        torch.manual_seed(0)
        generated.append(model.generate(**chats, max_new_tokens=8, do_sample=True, temperature=0.8))
    assert torch.equal(*generated)


def test_lora_training_merging_and_reloading(smollm2: Path, tokenizer: Any, tmp_path: Path) -> None:
    """Adapters trained on both models from the same start have the same losses and merged weights."""
    from peft import LoraConfig, PeftModel, get_peft_model

    batch = tokenizer(["The capital of France is Lyon."] * 2, return_tensors="pt")
    losses, trained = [], []
    load: Any
    for load, options in ((AutoModelForCausalLM, {"combine": True}), (HFAutoModelForCausalLM, {})):
        torch.manual_seed(0)
        model: Any = load.from_pretrained(smollm2, dtype=torch.float32, **options)
        lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
        tuned: Any = get_peft_model(model, lora)
        optimizer = torch.optim.AdamW([p for p in tuned.parameters() if p.requires_grad], lr=5e-3)
        losses.append([])
        for _ in range(3):
            loss = tuned(**batch, labels=batch["input_ids"]).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[-1].append(loss.item())
        trained.append(tuned.eval())
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0][-1] < losses[0][0] - 0.5
    nrl_adapter, upstream = trained
    nrl_adapter.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = nrl_adapter(**batch).logits
        again: Any = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
        assert torch.equal(PeftModel.from_pretrained(again, tmp_path)(**batch).logits, expected)
    theirs: Any = PeftModel.from_pretrained(upstream.unload(), tmp_path).merge_and_unload()
    merged = nrl_adapter.merge_and_unload()
    assert_same(merged.state_dict(), theirs.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(merged(**batch).logits, expected, rtol=1e-3, atol=1e-3)
    assert sum(group.joined for group in report(merged)) == 2 * 30
