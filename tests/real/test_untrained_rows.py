"""Diagnostic 3 on pretrained models: the rows of their embeddings that pretraining hardly moved."""

from __future__ import annotations

from pathlib import Path

from nrl_models.consistency.prompts import load_tokenizer
from nrl_models.diagnostics.embeddings import diagnose_embeddings


def test_smollm2s_untrained_rows(smollm2: Path) -> None:
    """Rows that its pretraining hardly moved: fifteen are equal bit for bit, and point the way of some others."""
    result = diagnose_embeddings(smollm2, tokenizer=load_tokenizer(smollm2))
    first, second = result.measured["embeddings"]
    assert not result.passed
    assert (second["duplicates"], second["clusters"]) == (first["duplicates"], first["clusters"])
    assert [len(group) for group in first["duplicates"]] == [7, 4, 2, 2]
    (cluster,) = first["clusters"]
    assert {row for group in first["duplicates"] for row in group} < set(cluster)
    assert len(cluster) < 0.001 * first["shape"][0]
    assert any("'<file_sep>', '<issue_comment>'" in line for line in result.lines)


def test_gemma_3s_unused_rows(gemma3_270m: Path) -> None:
    """Those 4,544 of `<unused0>` to `<unused6241>` that have a cosine of 0.9 with their mean, at few trained rows."""
    tokenizer = load_tokenizer(gemma3_270m)
    first = diagnose_embeddings(gemma3_270m).measured["embeddings"][0]
    unused = {row for token, row in tokenizer.get_vocab().items() if token.startswith("<unused")}
    found = {row for group in first["clusters"] for row in group}
    assert len(unused & found) > 0.95 * 4544
    # Bytes and special tokens point the way of unused tokens, and were trained as little.
    (unused_like, *others) = first["clusters"]
    assert len(unused_like) > 0.9 * len(found)
    assert sum(map(len, others)) < 0.001 * first["shape"][0]
