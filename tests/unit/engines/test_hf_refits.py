"""Refits of transformers engines: inference mode, reused buffers, and tensors that share the engine's memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, PreTrainedModel, Qwen3MoeConfig

from nrl_models import AutoModelForCausalLM
from nrl_models.common.state_dict import buckets
from nrl_models.common.state_dict.adapter import adapter_of
from nrl_models.engines import start_engine
from nrl_models.engines.hf import HFEngine
from nrl_models.engines.transfer.sender import Sender
from nrl_models.errors import EngineError, MixedWeightsError
from nrl_models.testing.tiny import tiny_config

EXPERTS = "model.layers.0.mlp.experts."


@pytest.fixture
def moe() -> PreTrainedModel:
    return AutoModelForCausalLM.from_config(tiny_config(Qwen3MoeConfig), dtype=torch.float32)


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_refit_of_engine_started_in_inference_mode(moe: PreTrainedModel, tmp_path: Path, load_format: str) -> None:
    moe.save_pretrained(tmp_path)
    with torch.inference_mode():
        engine = start_engine("hf-generate", tmp_path, dtype=torch.float32, load_format=load_format)
    sent = {name: tensor + 1 for name, tensor in moe.state_dict_adapter.iter_export(moe)}
    assert engine.refit(sent.items()).unwritten == ()
    actual = adapter_of(engine.model).to_hf(engine.model.state_dict())
    assert all(torch.equal(actual[name], tensor) for name, tensor in sent.items())


def swapped_experts(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return views of all weights, with experts 0 and 1 of a layer swapped."""
    views = dict(model.state_dict_adapter.iter_export(model))
    first, second = f"{EXPERTS}0.", f"{EXPERTS}1."
    names = {name: name.replace(first, second) if first in name else name.replace(second, first) for name in views}
    assert sum(name != other for name, other in names.items()) == 6
    return {name: views[other] for name, other in names.items()}


def test_refit_swaps_experts_by_views(moe: PreTrainedModel) -> None:
    sent = swapped_experts(moe)
    expected = {name: tensor.clone() for name, tensor in sent.items()}
    assert HFEngine(moe).refit(sent.items()).unwritten == ()
    actual = dict(moe.state_dict_adapter.iter_export(moe))
    assert all(torch.equal(actual[name], tensor) for name, tensor in expected.items())


def test_refit_with_overwritten_views_raises(moe: PreTrainedModel) -> None:
    with pytest.raises(MixedWeightsError, match=r"experts.* shares memory with weights of hf-generate that this refit"):
        HFEngine(moe).refit(swapped_experts(moe).items(), bucket_bytes=1)


def test_refit_with_own_weights_keeps_them(moe: PreTrainedModel) -> None:
    before = {name: tensor.clone() for name, tensor in moe.state_dict().items()}
    HFEngine(moe).refit(moe.state_dict_adapter.iter_export(moe), bucket_bytes=1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in moe.state_dict().items())


def test_refit_of_tied_engine_with_untied_weights(tmp_path: Path) -> None:
    config = tiny_config(LlamaConfig)
    config.tie_word_embeddings = True
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(tmp_path / "tied")
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() + 1)
    message = r"ties them.*set tie_word_embeddings=False.*succeeds: refit it again with weights that it accepts, or .*$"
    with pytest.raises(MixedWeightsError, match=message):
        start_engine("hf-generate", tmp_path / "tied").refit(model.state_dict_adapter.iter_export(model))
    model.config.tie_word_embeddings = False
    model.save_pretrained(tmp_path / "untied")
    engine = start_engine("hf-generate", tmp_path / "untied")
    assert engine.refit(model.state_dict_adapter.iter_export(model)).unwritten == ()


def in_one_buffer(tensors: Iterable[tuple[str, torch.Tensor]], size: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each tensor in the same buffer."""
    buffer = torch.empty(size)
    for name, tensor in tensors:
        part = buffer[: tensor.numel()].view(tensor.shape)
        part.copy_(tensor)
        yield name, part
        del part


def one_after_the_other(sent: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each tensor in a separate part of one buffer."""
    buffer, start = torch.empty(sum(tensor.numel() for tensor in sent.values())), 0
    for name, tensor in sent.items():
        part = buffer[start : start + tensor.numel()].view(tensor.shape)
        start += tensor.numel()
        part.copy_(tensor)
        yield name, part


def new_weights(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: tensor + 1 for name, tensor in model.state_dict_adapter.iter_export(model)}


@pytest.mark.parametrize("bucket_bytes", [None, 0, 1, 20_000, 10**9])
def test_refit_from_reused_buffer_raises(moe: PreTrainedModel, bucket_bytes: int | None) -> None:
    sent, before = new_weights(moe), {name: tensor.clone() for name, tensor in moe.state_dict().items()}
    size = max(tensor.numel() for tensor in sent.values())
    with pytest.raises(EngineError, match=r"was changed after the generator yielded it.*: yield a copy") as caught:
        HFEngine(moe).refit(in_one_buffer(sent.items(), size), bucket_bytes=bucket_bytes)
    assert not isinstance(caught.value, MixedWeightsError)
    assert next(iter(sent)) in str(caught.value)
    assert all(torch.equal(tensor, before[name]) for name, tensor in moe.state_dict().items())


@pytest.mark.parametrize("bucket_bytes", [None, 1, 20_000])
@pytest.mark.parametrize("inference", [False, True])
def test_refit_from_parts_of_a_buffer(moe: PreTrainedModel, bucket_bytes: int | None, inference: bool) -> None:
    sent = new_weights(moe)
    with torch.inference_mode() if inference else nullcontext():
        size = max(tensor.numel() for tensor in sent.values())
        weights = in_one_buffer(sent.items(), size) if inference else one_after_the_other(sent)
        assert HFEngine(moe).refit(weights, bucket_bytes=bucket_bytes).unwritten == ()
    assert all(torch.equal(tensor, sent[name]) for name, tensor in moe.state_dict_adapter.iter_export(moe))


def test_refit_changed_at_the_end_of_the_generator_raises(moe: PreTrainedModel) -> None:
    sent = new_weights(moe)

    def restored() -> Iterator[tuple[str, torch.Tensor]]:
        yield from sent.items()
        sent["model.norm.weight"].sub_(1)

    with pytest.raises(EngineError, match=r"model\.norm\.weight was changed after the generator yielded it"):
        HFEngine(moe).refit(restored())


@pytest.mark.parametrize("on_gpu", [False, True])
def test_sender_with_reused_buffer_raises(moe: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, on_gpu: bool) -> None:
    monkeypatch.setattr(buckets, "_is_on_gpu", lambda tensor: on_gpu)
    sent = new_weights(moe)
    weights = in_one_buffer(sent.items(), 2 * max(tensor.numel() for tensor in sent.values()))
    with pytest.raises(EngineError, match="was changed after the generator yielded it"):
        Sender(None, bucket_bytes=20_000).send(weights)  # type: ignore[arg-type]
