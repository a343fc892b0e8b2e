"""How long onboarding takes: drawn, timed, written down, told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from nrl_models.onboarding import timing


def test_what_combines_is_timed_and_added_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[str] = []

    def time_one(model_class: type) -> dict[str, Any]:
        timed.append(model_class.__name__)
        seconds = 10.0 * len(timed)
        return {
            "architecture": model_class.__name__,
            "seconds": seconds,
            "cpu_seconds": seconds / 2,
            "load": 1.0,
            "green": len(timed) > 1,
        }

    monkeypatch.setattr(timing, "time_one", time_one)
    file = tmp_path / "times.json"
    file.write_text(
        json.dumps(
            {"timings": [{"architecture": "X", "seconds": 60.0, "cpu_seconds": 6.0, "load": 2.0, "green": True}]}
        )
    )
    classes = [transformers.MambaForCausalLM, transformers.OPTForCausalLM, transformers.LlamaForCausalLM]
    timing.time_onboarding(classes, 3, file)
    assert sorted(timed) == ["LlamaForCausalLM", "OPTForCausalLM"]  # Mamba has nothing to combine
    found = timing.read_timings(file)
    assert [one["architecture"] for one in found] == ["LlamaForCausalLM", "OPTForCausalLM", "X"]
    words = timing.in_words(found)
    assert "timed on 3 of them" in words
    assert "a median of 20 s by the clock and 6 s of CPU time" in words
    assert "2 of 3 came out" in words


def test_no_file_is_no_timings(tmp_path: Path) -> None:
    assert timing.read_timings(tmp_path / "absent.json") == []
