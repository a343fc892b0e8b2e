"""A real engine next to the trainer. `make test-engine` creates the environment for these tests."""

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
from nrl_models.testing.case import randomize
from nrl_models.testing.tiny import tiny_config

if TYPE_CHECKING:
    from tests.engine.one_engine import OneEngine

pytest.importorskip("vllm", reason="needs an inference engine: make test-engine", exc_type=ImportError)

DEMO = Path(__file__).parents[2] / "demo" / "checkpoint"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--every-family", action="store_true", help="compare every family with the engine, in an hour")


@pytest.fixture(autouse=True, scope="session")
def _environment() -> None:
    transformers.utils.logging.disable_progress_bar()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))  # for subprocesses


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's checkpoint, trained on real text. It is created if `make demo` has not created it."""
    if (DEMO / "config.json").exists():
        return DEMO
    from nrl_models.cli.demo import run_demo

    folder = tmp_path_factory.mktemp("demo")
    run_demo(folder)
    return folder / "checkpoint"


@pytest.fixture(scope="session")
def demo_trainer(demo: Path) -> HFEngine:
    """Our model of the demo's checkpoint, in fp32. Shared: undo any changes."""
    return HFEngine(AutoModelForCausalLM.from_pretrained(demo, dtype=torch.float32), "trainer")


@pytest.fixture(scope="session")
def demo_prompts(demo: Path) -> Prompts:
    """Prompts for the demo's checkpoint."""
    return Prompts.of_checkpoint(demo, read_config(demo).vocab_size)


@pytest.fixture(scope="session")
def vllm() -> Iterator[OneEngine]:
    """Start a vLLM engine, and stop the previous one. A test that starts its own engine has to `stop()` this one."""
    from tests.engine.one_engine import OneEngine

    with OneEngine() as start:
        yield start


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Write a tiny random checkpoint of a configuration class, with logits that spread over several nats."""

    def make(config_class: type[transformers.PreTrainedConfig], model_class: Any, **overrides: Any) -> Path:
        torch.manual_seed(0)
        model = model_class._from_config(tiny_config(config_class, overrides), dtype=torch.float32)
        randomize(model)
        folder = tmp_path_factory.mktemp(model_class.__name__)
        model.save_pretrained(folder)
        return folder

    return make
