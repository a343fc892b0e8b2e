"""The GRPO example with a real engine: log-probabilities agree, and completions end with the end token.

docs/rl-run.md shows training progress on a pretrained model.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer

sys.path.append(str(Path(__file__).parents[2] / "examples"))

import arithmetic
import grpo

TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


@pytest.fixture
def chat(demo: Path, tmp_path: Path) -> Path:
    """The demo's checkpoint with a chat template. Its completions end at the end of the line."""
    folder = shutil.copytree(demo, tmp_path / "chat")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    end_token_ids = [tokenizer.eos_token_id, *tokenizer("\n", add_special_tokens=False)["input_ids"]]
    file = folder / "generation_config.json"
    settings = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(settings | {"eos_token_id": end_token_ids}))
    return folder


def test_grpo_example(chat: Path, vllm: Callable[..., object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vllm.stop()
    # No completion of the demo's model is a sum.
    monkeypatch.setattr(
        arithmetic, "reward", lambda question, completion, ended: 1 / (1 + len(completion)) + 0.1 * ended
    )
    file = tmp_path / "history.json"
    settings = {"steps": 4, "questions": 4, "group": 4, "new-tokens": 12, "learning-rate": 1e-3, "evaluate-every": 2}
    options = [f"--{name}={value}" for name, value in settings.items()]
    grpo.main([str(chat), "--out", str(tmp_path / "out"), "--history", str(file), *options])

    history = json.loads(file.read_text())
    steps, evaluations = history["steps"], history["evaluations"]
    assert [step["step"] for step in steps] == [0, 1, 2, 3]
    assert [evaluation["step"] for evaluation in evaluations] == [0, 2, 4]
    assert max(step["token_mult_prob_error"] for step in steps) <= grpo.BOUND
    assert max(evaluation["token_mult_prob_error"] for evaluation in evaluations) <= grpo.BOUND
    # Before training, no greedy completion may end: the demo's weights depend on the CPU.
    assert any(evaluation["ended"] > 0 for evaluation in evaluations)
    assert all((evaluation["tokens"] < 12) == (evaluation["ended"] > 0) for evaluation in evaluations)
    assert any(step["ended"] > 0 and step["tokens"] < 12 for step in steps)  # one step has only 16 completions
    assert evaluations[0]["rewards"] != evaluations[-1]["rewards"]
    assert (tmp_path / "out" / "tokenizer.json").is_file()
