"""Replay the experts that vLLM chose in the trainer.

vLLM 0.32 returns them only with its second model runner, which requires Triton and does not run on a CPU. Its recorder
does run on a CPU. This test attaches it to the engine's model like that runner does, so shape and dtype are those that
vLLM returns.
"""

from __future__ import annotations

from pathlib import Path

import numpy
import pytest
import torch
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
    RoutedExpertsCapturer,
    bind_routed_experts_capturer,
)

from nrl_models.common.forward.routing import engine_routing, flip_rate, record_routing, replay_routing
from nrl_models.engines.vllm import VLLMEngine
from nrl_models.errors import EngineError
from nrl_models.logprobs import Sampling, token_logprobs, token_mult_prob_error
from tests.engine.families import BOUND, tiny_model
from tests.engine.inside import clear_prefix_cache, model_of
from tests.engine.one_engine import OneEngine


def routed(engine: VLLMEngine, tokens: list[int]) -> numpy.ndarray:
    """Return vLLM's choices for a sequence whose last token was sampled."""
    capturer = RoutedExpertsCapturer(256, engine.config)
    bind_routed_experts_capturer(model_of(engine), capturer)
    clear_prefix_cache(engine)  # cached tokens are not computed
    (sample,) = engine.generate([tokens[:-1]], Sampling(0.0), max_new_tokens=1)
    assert len(sample.tokens) == 1
    return capturer.snapshot_routing_data(len(tokens) - 1).numpy()


@pytest.mark.parametrize("architecture", ["Qwen3MoeForCausalLM", "MixtralForCausalLM", "DeepseekV3ForCausalLM"])
def test_routed_experts_are_replayed(architecture: str, vllm: OneEngine, tmp_path: Path) -> None:
    model = tiny_model(architecture)
    model.save_pretrained(tmp_path)
    engine = vllm(tmp_path)
    rows = [list(range(50, 90)), list(range(100, 117))]
    reported = [routed(engine, row) for row in rows]
    layers = model.config.num_hidden_layers
    for row, table in zip(rows, reported, strict=True):
        assert table.dtype == numpy.uint8
        assert table.shape == (len(row) - 1, layers, model.config.num_experts_per_tok)
    batch = torch.zeros(2, 40, dtype=torch.long)
    for line, row in zip(batch, rows, strict=True):
        line[: len(row)] = torch.tensor(row)
    record = engine_routing(model, reported)
    mask = torch.arange(40)[None] < torch.tensor([[len(row)] for row in rows])
    with record_routing(model) as trainer_record, torch.no_grad():
        model(batch, attention_mask=mask.long(), use_cache=False)
    chosen = {name: [choices[-1].reshape(80, -1)[mask.flatten()]] for name, choices in trainer_record.items()}
    theirs = {name: [choices[-1].reshape(80, -1)[mask.flatten()]] for name, choices in record.items()}
    is_reported = {name: (choices[0] >= 0).all(-1) for name, choices in theirs.items()}
    assert {int(row_mask.sum()) for row_mask in is_reported.values()} == {len(rows[0]) + len(rows[1]) - 2}
    # Equal weights in fp32: both sides choose the same experts.
    reported_choices = [
        {name: [choices_by_router[name][0][is_reported[name]]] for name in choices_by_router}
        for choices_by_router in (chosen, theirs)
    ]
    assert flip_rate(*reported_choices) <= 0.02
    with replay_routing(model, record), torch.no_grad():
        replayed = token_logprobs(model, batch, attention_mask=mask.long()).logprobs
    for line, row, scored in zip(replayed, rows, engine.score(rows, Sampling()), strict=True):
        assert token_mult_prob_error(line[1 : len(row)], torch.tensor(scored[1:])) <= BOUND
    # The trainer's own choice with other routers then has no effect.
    choices = {name: model.get_submodule(name) for name in record}
    router_outputs: dict[str, torch.Tensor] = {}
    for name, router in choices.items():
        router.weight.data.neg_()
        router.register_forward_hook(lambda *call, name=name: router_outputs.update({name: call[2]}))
    with replay_routing(model, record), torch.no_grad():
        model(batch, attention_mask=mask.long(), use_cache=False)
    for name, outputs in router_outputs.items():
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        used = next(out for out in outputs if not out.is_floating_point()).reshape(80, -1)[mask.flatten()]
        assert torch.equal(used[is_reported[name]], theirs[name][0][is_reported[name]])


def test_routed_experts_unsupported_on_cpu_raise(vllm: OneEngine, tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("supported on a GPU")
    vllm.stop()
    model = tiny_model("Qwen3MoeForCausalLM")
    model.save_pretrained(tmp_path)
    with pytest.raises(EngineError, match="AuxOutput Connector requires Model Runner V2"):
        VLLMEngine.start(tmp_path, dtype=torch.float32, max_length=64, enable_return_routed_experts=True)
