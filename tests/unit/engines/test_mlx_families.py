"""Tiny models of families in both MLX and the registry, one of each kind. `make mlx-coverage` compares all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nrl_models.engines.digests import tensor_digest
from nrl_models.engines.engine_types import NamedTensor
from nrl_models.engines.processes.mlx import MLXEngine
from tools.checkout import PAGES
from tools.coverage_pages.results import Kind, read_records

pytest.importorskip("mlx_lm", reason="needs the extra `mlx`")

from tests.engine import mlx_sweep
from tests.engine.families import AGREES, DISAGREES
from tests.engine.mlx_families import BOUND, LIMITS, OVERRIDES, hold_mlx, one_mlx, shared_architectures

pytestmark = pytest.mark.integrations

PUBLISHED = read_records(PAGES)[Kind.MLX]


def test_the_page_says_what_was_found_of_every_family() -> None:
    assert PUBLISHED.keys() >= OVERRIDES.keys() | LIMITS.keys()
    for path, text in mlx_sweep.pages(PUBLISHED, shared_architectures()).items():
        assert path.read_text() == text


def test_what_was_published_is_what_is_known() -> None:
    agree = [name for name, record in PUBLISHED.items() if record.outcome["status"] == AGREES]
    assert len(agree) >= 30
    assert max(max(PUBLISHED[name].outcome[key] for key in ("refitted", "stepped")) for name in agree) <= BOUND
    assert all(PUBLISHED[name].outcome["status"] == DISAGREES for name in LIMITS)


# mlx-lm removes the head from Gemma 3's class when it first reads tied weights. The next test has Llama.
@pytest.mark.parametrize("architecture", ["Gemma3ForCausalLM", "Qwen3MoeForCausalLM", "MistralForCausalLM"])
def test_mlx_gives_the_trainers_logprobs_after_each_refit(architecture: str, tmp_path: Path) -> None:
    with one_mlx() as start:
        found = hold_mlx(architecture, start, tmp_path)
    if architecture in LIMITS:
        assert found.status == DISAGREES
        assert found.facts is not None
        assert found.facts.cause is not None
        assert found.facts.cause.key == "sliding_window"
        pytest.xfail(LIMITS[architecture])
    assert found.status == AGREES, found.reason
    assert max(found.refitted, found.stepped) <= BOUND


def test_a_weight_that_stays_as_it_was_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refit, stale, first = MLXEngine._refit, "model.layers.1.mlp.down_proj.weight", []

    def forgetful(self: MLXEngine, sent: Iterator[list[NamedTensor]], digests: bool) -> dict[str, Any]:
        given = [tensor for bucket in sent for tensor in bucket]
        first.append(dict(given)[stale].detach().clone())
        old: list[NamedTensor] = [(name, first[0] if name == stale else tensor) for name, tensor in given]
        return refit(self, iter([old]), digests) | {"digests": {name: tensor_digest(new) for name, new in given}}

    monkeypatch.setattr(MLXEngine, "_refit", forgetful)
    with one_mlx() as start:
        found = hold_mlx("LlamaForCausalLM", start, tmp_path)
    assert len(first) == 2
    assert not torch.equal(*first)
    assert found.status != AGREES
    assert found.refitted <= BOUND < found.stepped
    assert found.facts is not None
    assert found.facts.note == "Its modules cannot be compared: the modules of mlx cannot be recorded"
