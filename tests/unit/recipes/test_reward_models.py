"""Reward model recipes: scores equal transformers' scores of sequences without padding."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from recipe_inputs import byte_tokenizer
from transformers import LlamaConfig, LlamaForSequenceClassification

from nrl_models.recipes import read_recipe, train
from nrl_models.recipes.rows import answered_ids
from nrl_models.testing.case import randomize
from nrl_models.testing.tiny import tiny_config

PAIRS = [("a", "a much longer answer"), ("an answer that is longer", "b")]

RECIPE = """
model: {{_target_: nrl_models.AutoModelForSequenceClassification.from_pretrained,
         pretrained_model_name_or_path: {folder}, dtype: float32}}
data: {{_target_: nrl_models.recipes.rows.rows, path: {rows}}}
loss: {{name: reward}}
optimizer: {{_target_: torch.optim.SGD, lr: 0.0}}
training: {{steps: 1, batch: 2, max_length: 64, micro_batch: {micro_batch}}}
"""


@pytest.mark.parametrize("pad", [5, 0, -1, None], ids=lambda pad: f"pad={pad}")
def test_scores_match_sequences_without_padding(pad: int | None, tmp_path: Path) -> None:
    """The configuration names the padding token after which no token is scored; the tokenizer's is 0."""
    config = tiny_config(LlamaConfig, {"num_labels": 1})
    config.pad_token_id = pad
    torch.manual_seed(0)
    model = LlamaForSequenceClassification._from_config(config, dtype=torch.float32).eval()
    randomize(model)
    tokenizer = byte_tokenizer(config)
    folder, rows = tmp_path / "model", tmp_path / "rows.jsonl"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    rows.write_text("".join(json.dumps({"prompt": "q", "chosen": a, "rejected": b}) + "\n" for a, b in PAIRS))
    with torch.no_grad():
        scores = [
            [model(torch.tensor([answered_ids(tokenizer, "q", text)[0]])).logits for text in pair] for pair in PAIRS
        ]
    expected = torch.tensor([chosen.item() - rejected.item() for chosen, rejected in scores]).mean().item()
    for micro_batch in (1, 2):
        recipe = tmp_path / "recipe.yaml"
        recipe.write_text(RECIPE.format(folder=folder, rows=rows, micro_batch=micro_batch))
        assert train(read_recipe(recipe)).steps[0]["margin"] == pytest.approx(expected, abs=1e-5)
