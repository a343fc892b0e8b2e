"""Engines that fail during a refit raise EngineError. The trainer and a new engine keep working."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nrl_models import registry
from nrl_models.engines.engine_types import NamedTensor
from nrl_models.engines.hf import HFEngine
from nrl_models.engines.transfer import reload
from nrl_models.engines.transfer.sent_tensors import require_range
from nrl_models.engines.vllm import VLLMEngine
from nrl_models.errors import EngineError, MixedWeightsError
from nrl_models.logprobs import Sampling
from nrl_models.testing.case import FamilyCase


class DyingLLM:
    """The interface of vLLM that `VLLMEngine` uses. It dies in one call, and every later call raises."""

    def __init__(self, dies_in: str, after: int = 0) -> None:
        self.dies_in, self.left, self.dead, self.calls = dies_in, after, False, []
        model = SimpleNamespace(logprobs_mode="processed_logprobs")
        self.llm_engine = SimpleNamespace(
            vllm_config=SimpleNamespace(model_config=model, lora_config=None),
            engine_core=SimpleNamespace(shutdown=lambda: None),
        )

    def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        self.calls.append(method)
        if method == self.dies_in:
            self.dead, self.left = self.dead or self.left <= 0, self.left - 1
        self.reset_prefix_cache()
        return [{"digests": {}, "unwritten": [], "stale_buffers": []}]

    def reset_prefix_cache(self) -> None:
        if self.dead:
            raise RuntimeError("EngineCore encountered an issue")


@pytest.mark.parametrize("dies_in", ["nrl_refit_start", "nrl_refit_load", "nrl_refit_finish"])
def test_engine_crash_during_refit(trainer: HFEngine, engine: HFEngine, prompts: list[list[int]], dies_in: str) -> None:
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    expected = trainer.score(prompts, Sampling())
    llm = DyingLLM(dies_in, after=2 if dies_in == "nrl_refit_load" else 0)
    dying = VLLMEngine(llm)
    with pytest.raises(EngineError, match=r"vLLM failed: RuntimeError: EngineCore encountered an issue") as caught:
        dying.refit(trainer.model.state_dict_adapter.iter_export(trainer.model), bucket_bytes=2**16)
    assert "refit it again" in str(caught.value)
    assert llm.calls[-1] == "nrl_refit_abandon"
    torch.testing.assert_close(dict(trainer.model.state_dict()), before, rtol=0, atol=0)
    engine.refit(trainer.model.state_dict_adapter.iter_export(trainer.model))
    for actual, wanted in zip(engine.score(prompts, Sampling()), expected, strict=True):
        assert actual[1:] == pytest.approx(wanted[1:], abs=1e-4)


def test_refit_after_interrupted_refit(trainer: HFEngine, checkpoint: Path, prompts: list[list[int]]) -> None:
    """The iterator of tensors is interrupted, as by Ctrl-C."""

    def interrupted_export() -> Iterator[NamedTensor]:
        for number, pair in enumerate(trainer.model.state_dict_adapter.iter_export(trainer.model)):
            if number == 5:
                raise KeyboardInterrupt
            yield pair

    llm = DyingLLM("nothing")
    with pytest.raises(KeyboardInterrupt) as caught:
        VLLMEngine(llm).refit(interrupted_export(), bucket_bytes=1)
    assert "raises on every call until" in caught.value.__notes__[0]
    assert llm.calls == ["nrl_refit_start", *["nrl_refit_load"] * 4, "nrl_refit_abandon"]
    engine = HFEngine.start(checkpoint, dtype=torch.float32, load_format="dummy", seed=3)
    with pytest.raises(KeyboardInterrupt):
        engine.refit(interrupted_export(), bucket_bytes=1)
    message = r"parts of version 0 of the weights and parts of version 1, whose refit failed \(KeyboardInterrupt"
    for call in (
        lambda: engine.score(prompts, Sampling()),
        lambda: engine.generate(prompts, Sampling(), max_new_tokens=2),
        lambda: engine.module_calls(prompts[0]),
    ):
        with pytest.raises(MixedWeightsError, match=message):
            call()
    report = engine.refit(trainer.model.state_dict_adapter.iter_export(trainer.model))
    assert (report.unwritten, report.version) == ((), 1)
    for actual, wanted in zip(engine.score(prompts, Sampling()), trainer.score(prompts, Sampling()), strict=True):
        assert actual[1:] == pytest.approx(wanted[1:], abs=1e-4)


def test_incomplete_refit_raises_unless_partial(trainer: HFEngine, checkpoint: Path, prompts: list[list[int]]) -> None:
    engine = HFEngine.start(checkpoint, dtype=torch.float32, load_format="dummy", seed=3)
    weights = dict(trainer.model.state_dict_adapter.iter_export(trainer.model))
    missing = next(name for name in weights if name.endswith("o_proj.weight"))
    some = [(name, tensor) for name, tensor in weights.items() if name != missing]
    with pytest.raises(MixedWeightsError, match=f"left 1 tensors unwritten: {missing}"):
        engine.refit(some)
    with pytest.raises(MixedWeightsError):
        engine.score(prompts, Sampling())
    assert engine.version == 0
    assert engine.refit(some, partial=True).unwritten == (missing,)
    engine.score(prompts, Sampling())


def test_partial_refit_does_not_complete_failed_refit(
    trainer: HFEngine, checkpoint: Path, prompts: list[list[int]]
) -> None:
    engine = HFEngine.start(checkpoint, dtype=torch.float32, load_format="dummy", seed=3)
    weights = list(trainer.model.state_dict_adapter.iter_export(trainer.model))
    with pytest.raises(MixedWeightsError):
        engine.refit(weights[1:])
    with pytest.raises(MixedWeightsError, match=f"left {len(weights) - 1} tensors unwritten"):
        engine.refit(weights[:1], partial=True)
    with pytest.raises(MixedWeightsError):  # the first tensor is now of another version than the others
        engine.refit(weights[1:], partial=True)
    with pytest.raises(MixedWeightsError):
        engine.score(prompts, Sampling())
    assert engine.refit(weights).unwritten == ()
    engine.score(prompts, Sampling())


def test_failed_refit_without_writes_keeps_version(
    trainer: HFEngine, checkpoint: Path, prompts: list[list[int]]
) -> None:
    engine = HFEngine.start(checkpoint, dtype=torch.float32)
    before = [row[1:] for row in engine.score(prompts, Sampling())]
    name, tensor = next(iter(trainer.model.state_dict_adapter.iter_export(trainer.model)))
    with pytest.raises(EngineError, match="cannot load") as caught:
        engine.refit([(name, tensor[:-1])])
    assert not isinstance(caught.value, MixedWeightsError)
    assert [row[1:] for row in engine.score(prompts, Sampling())] == before


NOT_PAIRS: dict[str, tuple[Callable[[str, torch.Tensor], Any], str]] = {
    "an array": (lambda name, tensor: (name, tensor.numpy()), r"o_proj\.weight is a ndarray: expected a torch\.Tensor"),
    "None": (lambda name, tensor: (name, None), r"o_proj\.weight is a NoneType"),
    "on meta": (lambda name, tensor: (name, tensor.to("meta")), r"o_proj\.weight is on meta and has no values"),
    "sparse": (lambda name, tensor: (name, tensor.to_sparse()), r"o_proj\.weight has the layout torch\.sparse_coo"),
    "a number for a name": (lambda name, tensor: (3, tensor), r"pairs of name and tensor, and got \['int', 'Tensor'\]"),
    "three": (lambda name, tensor: (name, tensor, 1), r"and got \['str', 'Tensor', 'int'\]"),
    "a name": (lambda name, tensor: name, "and got str"),
}
"""Items that are not a pair of name and tensor with values, and the error."""


@pytest.mark.parametrize("edit", NOT_PAIRS)
def test_refit_items_that_are_not_named_tensors_raise(
    trainer: HFEngine, engine: HFEngine, prompts: list[list[int]], edit: str
) -> None:
    change, message = NOT_PAIRS[edit]
    weights = trainer.model.state_dict_adapter.iter_export(trainer.model)
    sent = [change(name, tensor) if "o_proj" in name else (name, tensor) for name, tensor in weights]
    with pytest.raises(EngineError, match=message):
        engine.refit(sent)
    engine.score(prompts, Sampling())  # nothing was written


@pytest.mark.parametrize("sent", [{"model.norm.weight": torch.ones(256)}, None, []], ids=["dict", "None", "nothing"])
def test_refit_without_pairs_raises(engine: HFEngine, prompts: list[list[int]], sent: Any) -> None:
    with pytest.raises(EngineError, match=r"a refit (takes pairs of name and tensor|without tensors)") as caught:
        engine.refit(sent)
    assert not isinstance(caught.value, MixedWeightsError)
    engine.score(prompts, Sampling())
    with pytest.raises(EngineError, match="bucket_bytes='1': expected a whole number"):
        engine.refit([("model.norm.weight", torch.ones(256))], bucket_bytes="1")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("sent_dtype", "engine_dtype", "value"),
    [("float32", "float16", 7e4), ("bfloat16", "float16", -1e30), ("float64", "float32", 1e39)],
)
def test_values_exceeding_engine_dtype_raise(
    trainer: HFEngine, checkpoint: Path, sent_dtype: str, engine_dtype: str, value: float
) -> None:
    engine = HFEngine.start(checkpoint, dtype=getattr(torch, engine_dtype))
    weights = {name: tensor.clone() for name, tensor in trainer.model.state_dict_adapter.iter_export(trainer.model)}
    name = "model.layers.1.mlp.down_proj.weight"
    weights[name] = weights[name].to(getattr(torch, sent_dtype))
    weights[name][3, 4] = value
    with pytest.raises(EngineError, match=rf"{name} has values from .* holds {engine_dtype} there, which ends at"):
        engine.refit(weights.items())
    assert all(tensor.isfinite().all() for tensor in engine.model.state_dict().values())
    target = torch.zeros(2, dtype=getattr(torch, engine_dtype))  # vLLM's loaders write with `Tensor.copy_`
    with reload._SameKind() as kinds:
        ((_, tensor),) = kinds.named([("a", torch.tensor([1.0, value], dtype=getattr(torch, sent_dtype)))])
        with pytest.raises(EngineError, match="a has values from"):
            target.copy_(tensor)
    weights[name][3, 4] = 1.0
    engine.refit(weights.items())


@pytest.mark.parametrize("value", [7e4, -7e4, 1e30])
def test_scalars_exceeding_engine_dtype_raise(value: float) -> None:
    with pytest.raises(EngineError, match=r"layer_scalar has values from .* holds float16 there, which ends at 65504"):
        require_range("layer_scalar", torch.tensor([value]), torch.float16)
    for allowed in (6e4, math.inf, -math.inf):
        require_range("layer_scalar", torch.tensor([allowed]), torch.float16)


@pytest.mark.parametrize("dtype", [torch.int32, torch.float8_e4m3fn, torch.bool], ids=str)
def test_refit_with_wrong_kind_of_dtype_raises(
    trainer: HFEngine, engine: HFEngine, prompts: list[list[int]], dtype: torch.dtype
) -> None:
    before = [row[1:] for row in engine.score(prompts, Sampling())]
    name, tensor = next(iter(trainer.model.state_dict_adapter.iter_export(trainer.model)))
    with pytest.raises(EngineError, match=rf"{name} was sent as {str(dtype)[6:]}, and the engine holds float32 there"):
        engine.refit([(name, (tensor * 100).to(dtype))])
    assert [row[1:] for row in engine.score(prompts, Sampling())] == before


class CopyingModel(torch.nn.Module):
    """A model whose loader writes with `Tensor.copy_`, as vLLM's do."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2, dtype=dtype))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        for _, tensor in weights:
            self.weight.data.copy_(tensor)
        return {"weight"}


@pytest.mark.parametrize(
    ("sent_dtype", "engine_dtype", "message"),
    [
        ("float32", "float16", "weight has values from"),
        ("bfloat16", "float16", "weight has values from"),
        ("int32", "float32", "weight was sent as int32, and the engine holds float32"),
        ("float32", "bfloat16", None),
        ("float16", "float32", None),
    ],
)
def test_reload_checks_dtype_conversions(
    monkeypatch: pytest.MonkeyPatch, sent_dtype: str, engine_dtype: str, message: str | None
) -> None:
    monkeypatch.setattr(reload.WeightReload, "_loading", lambda self: nullcontext())
    monkeypatch.setattr(reload, "kept_tensors", lambda model: [])
    model = CopyingModel(getattr(torch, engine_dtype))
    running = reload.WeightReload.__new__(reload.WeightReload)
    vars(running).update(model=model, _loaded=set(), _given=set(), _last=[], _kept=[], _ties=False, _head=None)
    running._dtypes = {model.weight.dtype}
    value = torch.tensor([1.0, 60_000.0 if sent_dtype == "float16" else 70_000.0]).to(getattr(torch, sent_dtype))
    with pytest.raises(EngineError, match=message) if message else nullcontext():
        running.load([("weight", value)])
    assert model.weight.isfinite().all()
    assert bool(model.weight.any()) is (message is None)


def test_two_names_for_one_tensor_raise(trainer: HFEngine, engine: HFEngine) -> None:
    weights = dict(trainer.model.state_dict_adapter.iter_export(trainer.model))
    name = "layers.1.mlp.down_proj.weight"  # the base model's name
    weights[name] = weights[f"model.{name}"] + 1
    with pytest.raises(EngineError, match=rf"{name} and model\.{name} are two names of one tensor"):
        engine.refit(weights.items())


def test_infinite_scalar_requires_infinite_engine_value() -> None:
    case = FamilyCase(registry.model_class("Gemma4ForConditionalGeneration"))
    engine, model = HFEngine(copy.deepcopy(case.reference())), case.model()
    weights = {name: tensor.clone() for name, tensor in model.state_dict_adapter.iter_export(model)}
    assert any(tensor.isinf().any() for tensor in weights.values())  # disabled clipping bounds
    engine.refit(weights.items())
    name = next(name for name in weights if name.endswith("layer_scalar"))
    weights[name].fill_(math.inf)
    with pytest.raises(EngineError, match=rf"{name} is inf, and hf-generate holds a finite value there"):
        engine.refit(weights.items())
