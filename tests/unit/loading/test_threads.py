"""Loading, building and saving in several threads leaves torch's state unchanged, and gives correct values."""

from __future__ import annotations

import ast
import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import new_model
from common.source_names import dotted, trees
from torch import nn
from transformers import LlamaConfig, MixtralConfig, PreTrainedModel, masking_utils

from nrl_models import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Sampling,
    start_engine,
    token_logprobs,
)
from nrl_models.common.checkpoint.limits import TENSORS, limited_build
from nrl_models.common.process_state import replaced_here
from nrl_models.distributed.pipeline.crossing import crossing_of
from nrl_models.engines.hf import HFEngine
from nrl_models.errors import ConfigurationError
from nrl_models.testing.suite.asserts import assert_same_tensors
from nrl_models.testing.tiny import tiny_config

THREADS = 4
ROUNDS, LONG_ROUNDS = 8, 250
"""Builds and saves per thread, and half the loads. Without the lock and the thread-local flag, first rounds fail."""


def process_state() -> list[Any]:
    """Return all process-wide state that building a model may change."""
    shared = [nn.Module.register_parameter, nn.Module.register_buffer, torch.empty, torch.get_default_dtype()]
    hooks = (value for name, value in vars(nn.modules.module).items() if name.startswith("_global_"))
    shared += [dict(value) for value in hooks if isinstance(value, dict)]
    shared += [masking_utils.find_packed_sequence_indices, nn.functional.scaled_dot_product_attention]
    shared += [PreTrainedModel.init_weights, PreTrainedModel.tie_weights, gc.isenabled()]
    return [*shared, *(getattr(nn.init, name) for name in sorted(vars(nn.init)) if name.endswith("_"))]


@pytest.mark.long
@pytest.mark.parametrize(
    ("dtype", "rounds"),
    [
        (torch.float32, ROUNDS),
        (torch.bfloat16, ROUNDS),
        pytest.param(torch.float32, LONG_ROUNDS, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_concurrent_load_build_and_save(
    dtype: torch.dtype, rounds: int, llama_config: LlamaConfig, tmp_path: Path
) -> None:
    llama_config.num_hidden_layers = 1
    saved = tmp_path / "saved"
    AutoModelForCausalLM.from_config(llama_config, dtype=dtype).save_pretrained(saved)
    before = process_state()
    expected = AutoModelForCausalLM.from_pretrained(saved)
    start_together = threading.Barrier(THREADS)

    def load(folder: Path) -> None:
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert_same_tensors(model.state_dict(), expected.state_dict())
        assert_same_tensors(dict(model.named_buffers()), dict(expected.named_buffers()))

    def build() -> None:
        model = AutoModelForCausalLM.from_config(llama_config, dtype=torch.float32)
        assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
        assert float(model.lm_head.weight.std()) == pytest.approx(llama_config.initializer_range, rel=0.1)

    def make_linear() -> None:
        """Build a module with torch alone, without the lock."""
        weight = nn.Linear(64, 64).weight.detach()
        assert weight.device.type == "cpu"
        assert 0.1 < float(weight.abs().max()) <= 1 / 8

    def run(thread: int) -> None:
        start_together.wait()
        for _ in range(rounds):
            load(saved)
            build()
            make_linear()
            expected.save_pretrained(tmp_path / str(thread))
            load(tmp_path / str(thread))

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(run, range(THREADS)))
    assert process_state() == before


OTHER_LOADS: dict[str, Callable[[Path], PreTrainedModel]] = {
    "base model": AutoModel.from_pretrained,
    "reward model": lambda folder: AutoModelForSequenceClassification.from_pretrained(
        folder, new_head=True, num_labels=1
    ),
    "bf16": lambda folder: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16),
    "device map": lambda folder: AutoModelForCausalLM.from_pretrained(folder, device_map={"": "cpu"}),
    "engine": lambda folder: start_engine("hf-generate", folder).model,
}


@pytest.mark.parametrize("rounds", [1, pytest.param(LONG_ROUNDS // 10, marks=pytest.mark.long)])
def test_concurrent_loads_of_other_kinds(rounds: int, tmp_path: Path) -> None:
    """Experts are converted on load. Each thread starts with another kind of load."""
    folder = tmp_path / "saved"
    new_model(tiny_config(MixtralConfig, {"num_hidden_layers": 1})).save_pretrained(folder)
    before = process_state()
    expected = {name: load(folder).state_dict() for name, load in OTHER_LOADS.items()}
    start_together = threading.Barrier(THREADS)

    def run(thread: int) -> None:
        start_together.wait()
        names = [*OTHER_LOADS][thread:] + [*OTHER_LOADS][:thread]
        for name in names * rounds:
            actual = OTHER_LOADS[name](folder).state_dict()
            for state in (actual, expected[name]):
                state.pop("score.weight", None)  # random
            assert_same_tensors(actual, expected[name])

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(run, range(THREADS)))
    assert process_state() == before


@pytest.mark.long
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_forked_process_can_load_during_load(llama_config: LlamaConfig, tmp_path: Path) -> None:
    llama_config.num_hidden_layers = 1
    AutoModelForCausalLM.from_config(llama_config, dtype=torch.float32).save_pretrained(tmp_path)
    stop = threading.Event()

    def load() -> None:
        while not stop.is_set():
            AutoModelForCausalLM.from_pretrained(tmp_path)

    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(load)
        statuses = []
        for _ in range(6):
            if (child := os.fork()) == 0:
                signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends a child that waits forever
                signal.alarm(60)
                AutoModelForCausalLM.from_pretrained(tmp_path)
                os._exit(0 if torch.get_default_dtype() == torch.float32 else 1)
            statuses.append(os.waitpid(child, 0)[1])
        stop.set()
        loading.result()
    assert statuses == [0] * 6


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("kind", ["token_logprobs", "engine"])
def test_forked_process_enters_model_during_a_call(kind: str, llama_config: LlamaConfig) -> None:
    """The child does not wait for locks of a thread that it does not have.

    That thread waits inside its call. The child ends when it enters the model, because matmuls of a forked process may
    wait forever for locks of torch.
    """
    llama_config.num_hidden_layers = 1
    model = AutoModelForCausalLM.from_config(llama_config, dtype=torch.float32).eval()
    tokens, engine = torch.arange(20, 44).view(2, 12), HFEngine(model, "engine")
    calls = {
        "token_logprobs": partial(token_logprobs, model, tokens),
        "engine": partial(engine.score, tokens.tolist(), Sampling()),
    }
    compute = calls[kind]
    parent, entered, release = os.getpid(), threading.Event(), threading.Event()

    def enter(*_: object) -> None:
        if os.getpid() != parent:
            os._exit(0)
        entered.set()
        release.wait()

    model.model.register_forward_pre_hook(enter)
    with ThreadPoolExecutor(1) as pool:
        computing = pool.submit(compute)
        assert entered.wait(60)
        if (child := os.fork()) == 0:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends a child that waits forever
            signal.alarm(60)
            try:
                compute()
            finally:
                os._exit(1)
        status = os.waitpid(child, 0)[1]
        release.set()
        computing.result()
    assert status == 0


def test_build_limits_are_thread_local() -> None:
    """torch's hooks on new modules are shared by all threads: adding one breaks a build in another thread."""
    before = process_state()
    with limited_build(0):
        assert process_state() == before
        with ThreadPoolExecutor(1) as pool:
            pool.submit(lambda: [torch.empty(0) for _ in range(TENSORS + 1)]).result()
        with pytest.raises(ConfigurationError, match="needs more than 20,000 tensors"):
            [torch.empty(0) for _ in range(TENSORS + 1)]


def test_replaced_function_is_thread_local() -> None:
    """The first of two threads ends its replacement first, so it would restore before the second one does."""
    before, position = process_state(), torch.tensor([[0, 1, 0, 1]])
    first_ends, second_ends = threading.Event(), threading.Event()
    both = threading.Barrier(3)

    def replace(value: str, ends: threading.Event) -> list[Any]:
        with replaced_here(masking_utils, "find_packed_sequence_indices", lambda position_ids: value):
            both.wait()
            found = [masking_utils.find_packed_sequence_indices(position)]
            with replaced_here(masking_utils, "find_packed_sequence_indices", lambda position_ids: "inner") as outer:
                found += [masking_utils.find_packed_sequence_indices(position), outer(position)]
            ends.wait()
            return [*found, masking_utils.find_packed_sequence_indices(position)]

    with ThreadPoolExecutor(2) as pool:
        results = [pool.submit(replace, "first", first_ends), pool.submit(replace, "second", second_ends)]
        both.wait()
        assert masking_utils.find_packed_sequence_indices(position).tolist() == [[0, 0, 1, 1]]
        first_ends.set()
        assert results[0].result() == ["first", "inner", "first", "first"]
        assert masking_utils.find_packed_sequence_indices(position).tolist() == [[0, 0, 1, 1]]
        second_ends.set()
        assert results[1].result() == ["second", "inner", "second", "second"]
    assert process_state() == before


def test_inherited_method_is_restored() -> None:
    with replaced_here(nn.Identity, "half", lambda self: "replaced"):
        assert nn.Identity().half() == "replaced"
        assert isinstance(nn.Linear(1, 1).half(), nn.Linear)
    assert "half" not in vars(nn.Identity)


def test_pipeline_trace_does_not_change_other_threads(llama_config: LlamaConfig) -> None:
    """While a model's layers are traced, another thread still keeps packed documents apart."""
    model = AutoModelForCausalLM.from_config(llama_config, dtype=torch.float32)
    found: list[Any] = []
    position = torch.tensor([[0, 1, 0, 1]])

    def elsewhere(*_: Any) -> None:
        with ThreadPoolExecutor(1) as pool:
            found.append(pool.submit(masking_utils.find_packed_sequence_indices, position).result())

    model.model.norm.register_forward_hook(elsewhere)
    crossing_of(model)
    assert [value.tolist() for value in found] == [[[0, 0, 1, 1]]]


def unlocked_builds(tree: ast.AST, locked: bool = False) -> Iterator[int]:
    """Yield the lines that build or initialize a transformers model without holding the lock."""
    for node in ast.iter_child_nodes(tree):
        called = getattr(node.func, "attr", "") if isinstance(node, ast.Call) else ""
        if called in ("_from_config", "initialize_weights") and not locked:
            yield node.lineno
        locks = locked or (isinstance(node, ast.With) and any(map(takes_lock, node.items)))
        yield from unlocked_builds(node, locks)


def takes_lock(item: ast.withitem) -> bool:
    expression = item.context_expr
    return dotted(getattr(expression, "func", expression)) in ("BUILDING", "_parameters_on_meta")


def test_all_builds_hold_lock() -> None:
    """transformers replaces functions of torch.nn.init and sets the default dtype while it builds a model."""
    modules = {name: tree for name, tree in trees().items() if not name.startswith(("families/", "testing/suite/"))}
    assert {name: list(unlocked_builds(tree)) for name, tree in modules.items() if [*unlocked_builds(tree)]} == {}
    assert [*unlocked_builds(ast.parse("model._from_config(config)"))] == [1]


def test_functions_are_replaced_in_one_thread_only() -> None:
    importers = [name for name, tree in trees().items() if any(map(imports_mock, ast.walk(tree)))]
    assert importers == [], "use replaced_here: mock.patch replaces functions for all threads"


def imports_mock(node: ast.AST) -> bool:
    return isinstance(node, ast.ImportFrom | ast.Import) and any("mock" in alias.name for alias in node.names)
