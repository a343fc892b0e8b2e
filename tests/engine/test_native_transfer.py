"""vLLM's own weight transfer with the backend and source of nrl_models, on a real engine without our worker."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.base import layerwise_groups

from nrl_models.engines.digests import tensor_digest
from nrl_models.engines.hf import HFEngine
from nrl_models.engines.transfer import vllm_engines
from nrl_models.engines.transfer.sender import Sender
from nrl_models.engines.transfer.updates import Update
from nrl_models.engines.transfer.vllm_engines import AdapterSource, SharedMemoryTrainerInit
from nrl_models.engines.transfer.vllm_plugin import NAME
from nrl_models.engines.vllm import VLLMEngine
from nrl_models.errors import EngineError
from nrl_models.logprobs import Sampling, token_mult_prob_error
from tests.engine.families import BOUND, tiny_model
from tests.engine.inside import model_of
from tests.engine.one_engine import OneEngine

PROMPTS = [list(range(50, 90)), list(range(120, 160))]

KINDS = {
    "dense": ("LlamaForCausalLM", {}),
    "tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "mixture": ("Qwen3MoeForCausalLM", {}),
    "latent": ("DeepseekV3ForCausalLM", {}),
    "tied with windows": ("Gemma3ForCausalLM", {}),
}


class Pair:
    """A trainer, and an engine with random weights."""

    def __init__(self, model: PreTrainedModel, engine: VLLMEngine) -> None:
        self.model, self.engine = model, engine
        self.source = AdapterSource(model)

    def error(self) -> float:
        """Return `token_mult_prob_error` between the two."""
        trainer = HFEngine(self.model, "trainer")
        scores = [
            torch.tensor([row[1:] for row in side.score(self.prompts, Sampling())]) for side in (trainer, self.engine)
        ]
        return token_mult_prob_error(*scores)

    @property
    def prompts(self) -> list[list[int]]:
        return [row[:30] for row in PROMPTS]

    @torch.no_grad()
    def train(self, share: float, seed: int, only: str = "") -> None:
        """Change a fraction of the elements of each parameter."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.model.named_parameters():
            if only in name:
                mask = torch.rand(parameter.shape, generator=generator) < share
                size = parameter.float().std().nan_to_num() + 1e-3
                parameter[mask] += size * torch.randn(int(mask.sum()), generator=generator)

    def engine_weights(self) -> dict[str, torch.Tensor]:
        """Return the weights that the engine uses."""
        return {name: tensor.clone() for name, tensor in model_of(self.engine).state_dict().items()}


class LLMClient:
    """A `SyncClient` that passes the announcements of an update to an `LLM` in this process."""

    def __init__(self, llm: Any) -> None:
        self.llm = llm

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.llm.init_weight_transfer_engine({"init_info": init_info})

    def start_weight_update(self) -> None:
        self.llm.start_weight_update()

    def update_weights(self, update_info: Any) -> None:
        self.llm.update_weights({"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.llm.finish_weight_update(weight_version)
        self.llm.reset_prefix_cache()  # clear the cache of earlier prompts


def start(kind: str, vllm: OneEngine, folder: Path, **options: object) -> Pair:
    architecture, overrides = KINDS[kind]
    model = tiny_model(architecture, overrides)
    model.save_pretrained(folder / "checkpoint")
    engine = vllm(
        folder / "checkpoint", load_format="dummy", seed=1, weight_transfer_config={"backend": NAME}, **options
    )
    return Pair(model, engine)


def are_identical(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Return True if all tensors are bit-identical."""
    assert one.keys() == other.keys()
    return all(tensor_digest(one[name]) == tensor_digest(other[name]) for name in one)


def nbytes(update: Update) -> int:
    return sum(segment.nbytes for segment in update.segments)


@pytest.mark.parametrize("kind", KINDS)
def test_deltas_match_dense_updates(kind: str, vllm: OneEngine, tmp_path: Path) -> None:
    pair = start(kind, vllm, tmp_path)
    client = LLMClient(pair.engine.llm)
    trainer = WeightTransferTrainerFactory.trainer_init(
        SharedMemoryTrainerInit(rank=0), client=client, source=pair.source
    )
    trainer.send_weights()
    complete = trainer.sent
    assert not complete.base
    assert pair.error() <= BOUND
    dense = Sender(client, deltas=False)
    for number, (share, only) in enumerate([(0.01, ""), (0.01, "layers.1."), (1.0, "norm"), (0.0, ""), (0.3, "")]):
        pair.train(share, number, only)
        trainer.send_weights()
        assert trainer.sent.base
        if not only:
            assert nbytes(trainer.sent) <= max(0.05, 2 * share) * nbytes(complete)
        assert pair.engine.llm.get_weight_version() == trainer.sent.version
        by_delta = pair.engine_weights()
        if share:
            assert pair.error() <= BOUND
        # Load the same weights from scratch with our worker.
        assert pair.engine.refit(pair.source).unwritten == ()
        assert are_identical(by_delta, pair.engine_weights())
    assert not dense.send(pair.source)[0].base
    assert are_identical(by_delta, pair.engine_weights())


def test_fused_layers_are_loaded_together(vllm: OneEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that each tensor is a separate layer: vLLM fuses queries, keys and values into one parameter."""
    pair = start("dense", vllm, tmp_path)
    sender = Sender(LLMClient(pair.engine.llm))
    _, before = sender.send(pair.source)
    monkeypatch.setattr(vllm_engines, "layerwise_groups", lambda names: [[name] for name in names])
    pair.train(0.1, 0, "layers.1.self_attn.q_proj")
    _, digests = sender.send(pair.source)
    changed = [name for name in digests if digests[name] != before[name]]
    assert changed == ["model.layers.1.self_attn.q_proj.weight"]
    by_delta = pair.engine_weights()
    assert pair.error() <= BOUND
    pair.engine.refit(pair.source)
    assert are_identical(by_delta, pair.engine_weights())


def test_source_metadata_matches_tensors(vllm: OneEngine, tmp_path: Path) -> None:
    """`metadata` and iteration agree, and tensors of a layer are adjacent, as vLLM's own transfer engines require."""
    for architecture in ("LlamaForCausalLM", "Qwen3MoeForCausalLM", "Gemma3ForCausalLM", "NemotronHForCausalLM"):
        source = AdapterSource(tiny_model(architecture))
        planned = [(meta.name, meta.dtype, meta.shape) for meta in source.metadata()]
        for _ in range(2):
            assert [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in source] == planned
        names = [name for name, _, _ in planned]
        assert [name for group, _ in source.iter_groups() for name in group] == list(chain(*layerwise_groups(names)))


def renamed(source: AdapterSource, old: str, new: str) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in source:
        yield name.replace(old, new), tensor


def test_wrong_name_in_first_update_raises_until_refit(vllm: OneEngine, tmp_path: Path) -> None:
    vllm.stop()
    pair = start("dense", vllm, tmp_path)
    sender = Sender(LLMClient(pair.engine.llm))
    with pytest.raises(Exception, match=r"parts of version .* and parts of version '1'"):
        sender.send(renamed(pair.source, "layers.1.input_layernorm", "layers.1.inputlayernorm"))
    with pytest.raises(EngineError, match=r"parts of version it was started with of the weights"):
        pair.engine.score(PROMPTS, Sampling())
    vllm.stop()  # after an error in a step, vLLM's scheduler waits for it


def test_missing_tensor_raises_until_complete_update(vllm: OneEngine, tmp_path: Path) -> None:
    vllm.stop()
    pair = start("mixture", vllm, tmp_path)
    sender = Sender(LLMClient(pair.engine.llm))
    missing = "model.layers.1.mlp.gate.weight"
    with pytest.raises(Exception, match=r"1 tensors were left unwritten: model\.layers\.1\.mlp\.gate\.weight"):
        sender.send((name, tensor) for name, tensor in pair.source if name != missing)
    worker = pair.engine.llm.collective_rpc(lambda worker: worker.weight_transfer_engine.receiver.mixed)
    assert worker == [True]
    assert not sender.send(pair.source)[0].base
    assert pair.error() <= BOUND


def test_update_of_another_model_raises_and_keeps_version(vllm: OneEngine, tmp_path: Path) -> None:
    pair = start("dense", vllm, tmp_path)
    sender = Sender(LLMClient(pair.engine.llm))
    sender.send(pair.source)
    before = pair.engine_weights()
    other = Pair(copy.deepcopy(pair.model), pair.engine)
    other.train(0.1, 0)
    for invalid_weights, message in (
        (renamed(other.source, "layers.1.input_layernorm", "layers.1.inputlayernorm"), "is not one of them"),
        ([(name, tensor[:-1] if "norm" in name else tensor) for name, tensor in other.source], "and was float32"),
    ):
        with pytest.raises(Exception, match=message):
            Sender(LLMClient(pair.engine.llm)).send(invalid_weights)
        assert are_identical(pair.engine_weights(), before)
        assert pair.error() <= BOUND
