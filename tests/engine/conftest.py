"""A real engine beside the trainer. `make test-engine` sets up an environment in which this runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import transformers

from nrl_models import AutoModelForCausalLM
from nrl_models.consistency.prompts import Prompts
from nrl_models.engines.hf import HFEngine
from nrl_models.loading.read_config import read_config
from nrl_models.testing.case import randomise
from nrl_models.testing.tiny import tiny_config

if TYPE_CHECKING:
    from tests.engine.one_engine import OneEngine

pytest.importorskip("vllm", reason="needs an inference engine: make test-engine", exc_type=ImportError)

DEMO = Path(__file__).parents[2] / "demo" / "checkpoint"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every-family", action="store_true", help="compare every family with the engine, in an hour")


@pytest.fixture(autouse=True, scope="session")
def _quiet() -> None:
    transformers.utils.logging.disable_progress_bar()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's checkpoint, trained on real text; made if `make demo` has not made it."""
    if (DEMO / "config.json").exists():
        return DEMO
    from nrl_models.cli.demo import run_demo

    folder = tmp_path_factory.mktemp("demo")
    run_demo(folder)
    return folder / "checkpoint"


@pytest.fixture(scope="session")
def demo_trainer(demo: Path) -> HFEngine:
    """Our model of it, in fp32. Shared: leave it as it was."""
    return HFEngine(AutoModelForCausalLM.from_pretrained(demo, dtype=torch.float32), "trainer")


@pytest.fixture(scope="session")
def demo_prompts(demo: Path) -> Prompts:
    """Prompts for it."""
    return Prompts.of_checkpoint(demo, read_config(demo).vocab_size)


@pytest.fixture(scope="session")
def vllm() -> Iterator[OneEngine]:
    """Starts a vLLM in place of the one that runs. A test that starts its own has to `stop()` this one."""
    from tests.engine.one_engine import OneEngine

    with OneEngine() as start:
        yield start


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Writes a tiny checkpoint of a configuration class, random but with logits spread over several nats."""

    def make(config_class: type[transformers.PreTrainedConfig], model_class: Any, **overrides: Any) -> Path:
        torch.manual_seed(0)
        model = model_class._from_config(tiny_config(config_class, overrides), dtype=torch.float32)
        randomise(model)
        folder = tmp_path_factory.mktemp(model_class.__name__)
        model.save_pretrained(folder)
        return folder

    return make
