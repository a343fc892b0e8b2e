"""The pretrained encoder all-MiniLM-L6-v2: embeddings equal transformers', and saving reproduces its files."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModel as HFAutoModel
from transformers import AutoTokenizer

from nrl_models import AutoModel
from tests.unit.checkpoints import assert_same, stored

SENTENCES = ("A man is eating food.", "Someone eats a meal.", "The stock market fell sharply today.")


def embedded(model: torch.nn.Module, folder: Path) -> torch.Tensor:
    """Return sentence embeddings, `(3, 384)`: the normalized mean over tokens."""
    batch = AutoTokenizer.from_pretrained(folder)(list(SENTENCES), padding=True, return_tensors="pt")
    with torch.no_grad():
        states = model(**batch).last_hidden_state
    mask = batch["attention_mask"][..., None].float()
    return torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)


def test_embeddings_match_transformers_and_round_trip(minilm: Path, tmp_path: Path) -> None:
    ours, theirs = AutoModel.from_pretrained(minilm), HFAutoModel.from_pretrained(minilm)
    vectors = embedded(ours, minilm)
    assert torch.equal(vectors, embedded(theirs, minilm))
    near, far = vectors[0] @ vectors[1], vectors[0] @ vectors[2]
    assert near > far + 0.4  # the pretrained weights are in use
    ours.save_pretrained(tmp_path)
    assert_same(stored(tmp_path), theirs.state_dict())
    reloaded, info = HFAutoModel.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    assert torch.equal(embedded(reloaded, minilm), vectors)
