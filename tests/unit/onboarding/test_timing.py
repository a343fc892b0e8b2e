"""The onboarding benchmark: drawing architectures, timing, saving and summarizing."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import transformers

sys.path.append(str(Path(__file__).parents[3]))

from benchmarks import onboarding
from benchmarks.reporting import Row


def row(name: str, seconds: float, load: float = 1.0, decided: str = "yes") -> Row:
    return {
        "architecture": name,
        "seconds": seconds,
        "CPU seconds": seconds / 2,
        "load": load,
        "family complete": decided,
    }


def test_only_classes_with_groups_are_drawn() -> None:
    classes = [transformers.MambaForCausalLM, transformers.OPTForCausalLM, transformers.LlamaForCausalLM]
    names = sorted(model_class.__name__ for model_class in onboarding.drawn(classes))
    assert names == ["LlamaForCausalLM", "OPTForCausalLM"]  # Mamba has nothing to combine


def test_timings_are_merged_into_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timed = iter((10.0, 20.0))
    monkeypatch.setattr(onboarding, "time_one", lambda timed_class: row(timed_class.__name__, next(timed)))
    file = tmp_path / "onboarding.json"
    file.write_text(json.dumps({"rows": [row("X", 60.0, 2.0, "no"), row("OPTForCausalLM", 99.0)]}))
    onboarding.measure([transformers.OPTForCausalLM, transformers.LlamaForCausalLM], tmp_path)
    content = json.loads(file.read_text())
    assert [(entry["architecture"], entry["seconds"]) for entry in content["rows"]] == [
        ("LlamaForCausalLM", 20.0), ("OPTForCausalLM", 10.0), ("X", 60.0)
    ]  # fmt: skip
    (words,) = content["notes"]
    assert words.startswith("3 decoders")
    assert "Median: 20 s wall-clock time, 10 s CPU time" in words
    assert words.endswith("For 2 of 3, the generated family was complete: no question was left to the user.")
