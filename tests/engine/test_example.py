"""The example's loop: the reward rises, and the engine keeps up with every step."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "grpo_tiny.py"


def test_the_reward_rises_and_the_logprobs_stay_together(
    demo: Path, vllm: Callable[..., object], tmp_path: Path
) -> None:
    vllm.stop()
    spec = importlib.util.spec_from_file_location("grpo_tiny", EXAMPLE)
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    file = tmp_path / "history.json"
    example.main(demo, steps=10, prompts=4, group=6, new_tokens=16, json_file=file)  # exits with 1 if either fails
    history = json.loads(file.read_text())
    assert len(history) == 10
    assert sum(entry["reward"] for entry in history[-3:]) > sum(entry["reward"] for entry in history[:3])
    assert max(one["token_mult_prob_error"] for one in history) <= 1.0001
