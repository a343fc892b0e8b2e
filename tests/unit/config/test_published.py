"""Published configurations load unchanged, and give the same model as in transformers."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from published_configs import published, shrunk
from transformers import PreTrainedConfig, PreTrainedModel
from versions import has_reached, since

import nrl_models
from nrl_models import registry
from nrl_models.common.config.validate import check_config, examine
from nrl_models.common.forward.soft_cap import reference_attention
from nrl_models.family import FamilyModel
from nrl_models.inputs.model_inputs import inputs_for
from nrl_models.loading.read_config import config_for, read_config
from nrl_models.testing.case import randomize
from nrl_models.testing.tiny import silent_transformers


class Notes(logging.Handler):
    """Messages logged by `check_config`."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


@pytest.fixture
def notes() -> Iterator[Notes]:
    handler, logger = Notes(), logging.getLogger(check_config.__module__)
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


@pytest.fixture(autouse=True)
def _register_and_silence_transformers() -> Iterator[None]:
    registry.register_custom_configs()
    with silent_transformers():
        yield


def write(folder: Path, values: dict) -> None:
    (folder / "config.json").write_text(json.dumps(values))


def class_of(auto: str, folder: Path) -> tuple[type[FamilyModel], PreTrainedConfig]:
    config = read_config(folder)
    architecture = getattr(nrl_models, auto).architecture(config)
    if unmet := registry.unmet_requirement(architecture):
        pytest.skip(f"needs {unmet}")
    model_class = registry.model_class(architecture)
    return model_class, config_for(model_class, config)


def as_transformers(model_class: type[FamilyModel], config: PreTrainedConfig, folder: Path) -> PreTrainedModel:
    """Save a model with random weights and the unchanged `config.json`, and load it with transformers."""
    content = (folder / "config.json").read_text()
    upstream = model_class.reference_class()
    torch.manual_seed(0)
    model = upstream._from_config(config, dtype=torch.float32)
    assert model.num_parameters() < 8e6, "sizes that the general rules do not know: say them in `tiny`"
    randomize(model)
    model.save_pretrained(folder)
    (folder / "config.json").write_text(content)
    return upstream.from_pretrained(folder, dtype=torch.float32, **reference_attention(upstream)).eval()


SINCE = {
    "deepseek-ai/DeepSeek-V3.2": "5.11",
    "google/gemma-4-26B-A4B": "5.15",
    "moonshotai/Kimi-K2.5": "5.15",
    "nvidia/Nemotron-H-8B-Base-8K": "5.8",
    **dict.fromkeys(("MiniMaxAI/MiniMax-M2.5", "MiniMaxAI/MiniMax-M2.7"), "5.16"),
}
"""The first transformers version that has the published configuration, or reads all its relevant keys."""


@pytest.mark.long
@pytest.mark.parametrize(
    "repository", [pytest.param(name, marks=since(SINCE[name]) if name in SINCE else ()) for name in published()]
)
def test_published_config_matches_transformers(repository: str, tmp_path: Path, notes: Notes) -> None:
    entry = published()[repository]
    write(tmp_path, dict(entry.config))
    model_class, config = class_of(entry.auto, tmp_path)
    unread = set(examine(model_class, config).unread)
    if has_reached("5.16"):  # older classes read fewer or other keys
        assert unread == set(entry.unread)
    write(tmp_path, dict(entry.config) | {"tie_word_embeding": "yes", "use_fourth_dimension": True})
    odd = examine(*class_of(entry.auto, tmp_path))
    assert [problem.subject for problem in odd.problems] == ["tie_word_embeding"]
    assert set(odd.unread) == {*unread, "use_fourth_dimension"}

    write(tmp_path, shrunk(entry, config))
    expected = as_transformers(*class_of(entry.auto, tmp_path), tmp_path)
    model = getattr(nrl_models, entry.auto).from_pretrained(tmp_path, dtype=torch.float32)
    assert type(model) is model_class
    inputs = inputs_for(expected, length=12)
    with torch.no_grad():
        # Logits, or hidden states of a base model.
        torch.testing.assert_close(model(**inputs)[0], expected(**inputs)[0], rtol=0, atol=1e-5)
    assert len(notes.said) == bool(entry.unread)
    assert all(f"{path}: " in notes.said[0] for path in entry.unread)


def test_number_of_published_configs() -> None:
    assert len(published()) >= 60
    assert sum(bool(entry.unread) for entry in published().values()) >= 20
