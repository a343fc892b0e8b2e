"""One process publishes many generations of a checkpoint while another loads it. No load mixes two generations."""

from __future__ import annotations

import json
import multiprocessing
import shutil
import time
from collections.abc import Callable
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nrl_models import AutoModelForCausalLM, CheckpointError, check_parity, start_engine
from nrl_models.common.checkpoint.local_path import CONFIG_NAME, GENERATION_NAME
from nrl_models.engines.hf import HFEngine
from nrl_models.errors import ProblemKind

GENERATIONS = 40
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
    return numbers_in(AutoModelForCausalLM.from_pretrained(folder))


def numbers_in(model: Any) -> set[float]:
    """Return the generation numbers in the weights and configurations of a model."""
    numbers = {float(number) for parameter in model.parameters() for number in parameter.detach().unique()}
    return numbers | {float(model.config.max_position_embeddings), float(model.generation_config.max_new_tokens or -1)}


@pytest.mark.long
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


def engine_numbers(folder: Path) -> set[float]:
    """Return the generation numbers of the model of the engine `hf-generate`."""
    engine = start_engine("hf-generate", folder)
    assert isinstance(engine, HFEngine)
    assert engine.model.name_or_path == str(folder)
    return numbers_in(engine.model)


def parity_numbers(folder: Path) -> set[float]:
    """Return the generation numbers of the model that equals its reference."""
    models: list[Any] = []
    assert check_parity(folder, checks=["1"], after_load=models.append).passed
    return numbers_in(models[-1])


def publish_during_loads(folder: Path, publishes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Publish another generation in each of the first loads of transformers, after it has read the configuration."""
    save(folder, FIRST)
    upstream: Any = LlamaForCausalLM.from_pretrained
    later = iter(range(FIRST + 1, FIRST + 1 + publishes))

    def from_pretrained(cls: type[LlamaForCausalLM], *arguments: Any, **keywords: Any) -> Any:
        if (number := next(later, None)) is not None:
            save(folder, number)
        return upstream.__func__(cls, *arguments, **keywords)

    monkeypatch.setattr(LlamaForCausalLM, "from_pretrained", classmethod(from_pretrained))


@pytest.mark.parametrize("load", [engine_numbers, parity_numbers])
def test_references_are_read_again_after_a_publish(
    load: Callable[[Path], set[float]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_during_loads(tmp_path, 1, monkeypatch)
    assert load(tmp_path) == {FIRST + 1}


def test_references_that_are_replaced_twice_raise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    publish_during_loads(tmp_path, 2, monkeypatch)
    with pytest.raises(CheckpointError) as raised:
        engine_numbers(tmp_path)
    assert {problem.kind for problem in raised.value.problems} == {ProblemKind.REPLACED}


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
