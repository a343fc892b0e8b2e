"""torch.compile: one graph, compiled once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import _dynamo
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import PreTrainedModel

from nrl_models import AutoModelForCausalLM


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    _dynamo.reset()
    _dynamo.utils.counters.clear()  # `reset` keeps the graph breaks counted by earlier tests
    yield
    _dynamo.reset()


def gradients(model: PreTrainedModel, run: object, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    run(input_ids=input_ids, labels=input_ids, use_cache=False).loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.long
@pytest.mark.parametrize("packed_before", [False, True])
def test_forward_and_backward_compile_one_graph_once(
    llama_checkpoint: Path, input_ids: torch.Tensor, packed_before: bool
) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama_checkpoint)
    if packed_before:
        model(input_ids=input_ids, position_ids=torch.arange(input_ids.shape[1]).remainder(4).expand_as(input_ids))
    backend = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    with torch.no_grad():
        expected = model(input_ids=input_ids, use_cache=False).logits
    with _dynamo.config.patch(error_on_recompile=True):
        for seed in (0, 1):
            ids = input_ids.roll(seed, dims=1)
            torch.testing.assert_close(gradients(model, compiled, ids), gradients(model, model, ids))
    assert backend.frame_count == 1
    # Under no_grad transformers runs other code, so this compiles a second graph, also without breaks.
    with torch.no_grad():
        torch.testing.assert_close(compiled(input_ids=input_ids, use_cache=False).logits, expected)
    assert not _dynamo.utils.counters["graph_break"]


def test_compiled_linear_uses_changed_weights(llama_checkpoint: Path, input_ids: torch.Tensor) -> None:
    model = AutoModelForCausalLM.from_pretrained(llama_checkpoint)
    attention = model.model.layers[0].self_attn
    compiled = torch.compile(attention.q_proj, fullgraph=True, backend="aot_eager")
    hidden = torch.randn(2, 3, 256)
    before = compiled(hidden)
    attention.q_proj.weight.data = attention.q_proj.weight * 2
    torch.testing.assert_close(compiled(hidden) - before, hidden @ attention.q_proj.weight.T / 2)
