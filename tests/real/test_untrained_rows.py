"""Diagnostic 3 on pretrained models: embedding rows that pretraining hardly changed."""

from __future__ import annotations

from pathlib import Path

from nrl_models.consistency.prompts import load_tokenizer
from nrl_models.diagnostics.embeddings import diagnose_embeddings


def test_smollm2_untrained_rows(smollm2: Path) -> None:
    """Rows that pretraining hardly changed. Fifteen are identical, and some others have almost the same direction."""
    result = diagnose_embeddings(smollm2, tokenizer=load_tokenizer(smollm2))
    first, second = result.measured["embeddings"]
    assert not result.passed
    assert (second["duplicates"], second["clusters"]) == (first["duplicates"], first["clusters"])
    assert [len(group) for group in first["duplicates"]] == [7, 4, 2, 2]
    (cluster,) = first["clusters"]
    assert {row for group in first["duplicates"] for row in group} < set(cluster)
    assert len(cluster) < 0.001 * first["shape"][0]
    assert any("'<file_sep>', '<issue_comment>'" in line for line in result.lines)


def test_gemma3_unused_rows(gemma3_270m: Path) -> None:
    """4,544 of the rows `<unused0>` to `<unused6241>` have a cosine of 0.9 with their mean. Few trained rows do."""
    tokenizer = load_tokenizer(gemma3_270m)
    first = diagnose_embeddings(gemma3_270m).measured["embeddings"][0]
    unused = {row for token, row in tokenizer.get_vocab().items() if token.startswith("<unused")}
    clustered = {row for group in first["clusters"] for row in group}
    assert len(unused & clustered) > 0.95 * 4544
    # Bytes and special tokens have the direction of unused tokens, and were trained as little.
    (unused_like, *others) = first["clusters"]
    assert len(unused_like) > 0.9 * len(clustered)
    assert sum(map(len, others)) < 0.001 * first["shape"][0]
