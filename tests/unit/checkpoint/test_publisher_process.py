"""One process publishes many generations of a checkpoint while another loads it. No load mixes two generations."""

from __future__ import annotations

import json
import multiprocessing
import shutil
import time
from multiprocessing.synchronize import Event
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from nrl_models import AutoModelForCausalLM, CheckpointError
from nrl_models.common.checkpoint.local_path import CONFIG_NAME, GENERATION_NAME
from nrl_models.errors import ProblemKind

GENERATIONS = 80
FIRST = 100
"""Number of the first generation, chosen to differ from all default values in the configuration."""

SHARD = "20KB"
CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    pad_token_id=0,
)


def save(folder: Path, number: int) -> None:
    """Save a generation. Its configurations and weights all contain its number. Every second generation is sharded."""
    model = AutoModelForCausalLM.from_config(CONFIG)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(number)
    model.config.max_position_embeddings = number
    model.generation_config.max_new_tokens = number
    model.save_pretrained(folder, **({"max_shard_size": SHARD} if number % 2 else {}))


def publish_many(folder: Path, ready: Event, done: Event) -> None:
    """Publish all generations but the first, in a separate process."""
    torch.set_num_threads(1)
    ready.set()
    try:
        for number in range(FIRST + 1, FIRST + GENERATIONS):
            save(folder, number)
            time.sleep(0.02 * (number % 7))
    finally:
        done.set()


def generation_numbers(folder: Path) -> set[float]:
    """Load the checkpoint and return its generation numbers: only one, unless the load mixed generations."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    numbers = {float(number) for parameter in model.parameters() for number in parameter.detach().unique()}
    return numbers | {float(model.config.max_position_embeddings), float(model.generation_config.max_new_tokens or -1)}


def test_no_load_mixes_generations(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    save(folder, FIRST)
    context = multiprocessing.get_context("spawn")
    ready, done = context.Event(), context.Event()
    publisher = context.Process(target=publish_many, args=(folder, ready, done))
    publisher.start()
    loaded: list[float] = []
    try:
        assert ready.wait(60)
        while not done.is_set():
            try:
                numbers = generation_numbers(folder)
            except CheckpointError as error:  # another generation replaced the checkpoint during the second read
                if {problem.kind for problem in error.problems} != {ProblemKind.REPLACED}:
                    raise
                continue
            assert len(numbers) == 1, numbers
            loaded += numbers
    finally:
        publisher.join(120)
    assert publisher.exitcode == 0
    assert loaded == sorted(loaded)
    assert len(set(loaded)) >= 3, f"{len(loaded)} loads"
    assert generation_numbers(folder) == {FIRST + GENERATIONS - 1}


@pytest.mark.parametrize("name", [CONFIG_NAME, GENERATION_NAME])
def test_mixed_generations_are_detected(name: str, tmp_path: Path) -> None:
    for number in (FIRST, FIRST + 2):
        save(tmp_path / str(number), number)
    shutil.copy(tmp_path / str(FIRST + 2) / name, tmp_path / str(FIRST) / name)
    assert generation_numbers(tmp_path / str(FIRST)) == {FIRST, FIRST + 2}
    if name == GENERATION_NAME:
        (tmp_path / str(FIRST) / name).unlink()
        assert -1 in generation_numbers(tmp_path / str(FIRST))
    assert json.loads((tmp_path / str(FIRST) / CONFIG_NAME).read_text())["model_type"] == "llama"
