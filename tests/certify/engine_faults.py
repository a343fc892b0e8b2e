"""Faults of the engine: stale or wrong weights, dropped adapters, wrong options, wrong log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from nrl_models.engines.base import Engine
from nrl_models.engines.hf import HFEngine
from nrl_models.engines.vllm import VLLMEngine
from nrl_models.logprobs.sampling import Sampling

Plant = Callable[[pytest.MonkeyPatch], None]

ENGINES: tuple[type[Engine], ...] = (HFEngine, VLLMEngine)
"""Classes of engines that get faults."""

FAULTY = ("hf-generate", "vllm")
"""Names of engines that get faults. The trainer and the reference share a class with the first, and stay correct."""


def _wrapping(name: str, wrong: Callable[..., Any]) -> Plant:
    """Replace a method of the engine."""

    def plant_in(patch: pytest.MonkeyPatch, engine_class: type[Engine]) -> None:
        original = getattr(engine_class, name)

        def method(self: Engine, *args: Any, **options: Any) -> Any:
            if self.name not in FAULTY:
                return original(self, *args, **options)
            return wrong(lambda *a, **o: original(self, *a, **o), *args, **options)

        patch.setattr(engine_class, name, method)

    def plant(patch: pytest.MonkeyPatch) -> None:
        for engine_class in ENGINES:
            plant_in(patch, engine_class)

    return plant


def _sent(change: Callable[[str, torch.Tensor], torch.Tensor | None]) -> Plant:
    """Change tensors on their way to the engine; None drops them."""

    def changed(tensors: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors:
            if (other := change(name, tensor)) is not None:
                yield name, other

    return _wrapping("refit", lambda refit, tensors, **options: refit(changed(tensors), **options | {"partial": True}))


def _written(change: Callable[[str, torch.Tensor], torch.Tensor]) -> Plant:
    """Change tensors where the engine writes them, after their digests."""

    def wrong(write: Any, sent: Any, digests: bool) -> Any:
        buckets = [list(bucket) for bucket in sent]
        report = write(iter(buckets), digests)
        write(iter([[(name, change(name, tensor)) for name, tensor in bucket] for bucket in buckets]), False)
        return report

    return _wrapping("_refit", wrong)


def _with_flipped_rows(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flip(0) if name.endswith("layers.1.mlp.gate_proj.weight") else tensor


def _second_refit_ignored(patch: pytest.MonkeyPatch) -> None:
    """After the first refit of an engine, write its tensors again instead of the new ones."""
    first: dict[int, list[list[tuple[str, torch.Tensor]]]] = {}

    def plant_in(engine_class: type[Engine]) -> None:
        original = engine_class._refit

        def refit(self: Engine, sent: Any, digests: bool) -> Any:
            buckets = [[(name, tensor.clone()) for name, tensor in bucket] for bucket in sent]
            report = original(self, iter(buckets), digests)
            if self.name in FAULTY and self.version == 0:
                first[id(self)] = buckets
            elif self.name in FAULTY:
                original(self, iter(first[id(self)]), False)
            return report

        patch.setattr(engine_class, "_refit", refit)

    for engine_class in ENGINES:
        plant_in(engine_class)


def _sampled(change: Callable[[tuple[float, ...]], tuple[float, ...]]) -> Plant:
    """Change the log-probabilities of sampled tokens."""

    def wrong(generate: Any, *args: Any, **options: Any) -> Any:
        return [replace(sample, logprobs=change(sample.logprobs)) for sample in generate(*args, **options)]

    return _wrapping("generate", wrong)


def _scored(change: Callable[[float], float]) -> Plant:
    def wrong(score: Any, *args: Any, **options: Any) -> Any:
        return [[change(value) for value in row] for row in score(*args, **options)]

    return _wrapping("score", wrong)


def _model(change: Callable[[Any], None]) -> Plant:
    """Change the engine's model when it starts."""

    def plant_in(patch: pytest.MonkeyPatch, engine_class: Any) -> None:
        original = engine_class.start.__func__

        def start(cls: type[Engine], *args: Any, **options: Any) -> Any:
            engine = original(cls, *args, **options)
            with torch.no_grad():
                change(engine.model if isinstance(engine, HFEngine) else _model_of(engine))
            return engine

        patch.setattr(engine_class, "start", classmethod(start))

    def plant(patch: pytest.MonkeyPatch) -> None:
        for engine_class in ENGINES:
            plant_in(patch, engine_class)

    return plant


def _model_of(engine: VLLMEngine) -> Any:
    """Return the model of a vLLM that runs in this process."""
    return engine.llm.collective_rpc("nrl_model")[0]


def _known(**values: Any) -> Plant:
    return _wrapping("capabilities", lambda capabilities: replace(capabilities(), **values))


def _nothing(patch: pytest.MonkeyPatch) -> None:
    """Change nothing: the options of `certify` are the fault."""


def _rounded(model: Any) -> None:
    for parameter in model.parameters():
        if parameter.ndim == 2:
            scale = parameter.abs().amax() / 7
            parameter.copy_((parameter / scale).round() * scale)


def _other_theta(model: Any) -> None:
    """Halve the frequencies: the tables of vLLM get those of half the position."""
    for module in model.modules():
        if hasattr(module, "inv_freq"):
            module.inv_freq.mul_(0.5)
        if hasattr(module, "cos_sin_cache"):
            positions = torch.arange(len(module.cos_sin_cache)) // 2
            module.cos_sin_cache.copy_(module.cos_sin_cache[positions])


def _temperature_ignored(call: Any, prompts: Any, sampling: Sampling, **options: Any) -> Any:
    return call(prompts, sampling if sampling.greedy else Sampling(), **options)


def _adapter_ignored(name: str, tensor: torch.Tensor) -> torch.Tensor | None:
    return None if name.endswith("q_proj.weight") else tensor


LLAMA: dict[str, tuple[Plant, dict[str, Any]]] = {
    "a layer is not refitted": (_sent(lambda name, tensor: None if "layers.1.mlp.up" in name else tensor), {}),
    "the head is not refitted": (_sent(lambda name, tensor: None if "lm_head" in name else tensor), {}),
    "a refit changes a tensor on the way": (
        _sent(lambda name, tensor: tensor * 1.5 if "o_proj" in name else tensor),
        {},
    ),
    "a refit writes rows in another order": (_written(_with_flipped_rows), {}),
    "a second refit is ignored": (_second_refit_ignored, {}),
    "an adapter is dropped for one linear": (_sent(_adapter_ignored), {}),
    "a refit is rounded to float8": (
        _written(lambda name, tensor: tensor.to(torch.float8_e4m3fn).to(tensor.dtype) if tensor.ndim == 2 else tensor),
        {},
    ),
    "log-probabilities at another temperature": (_sampled(lambda values: tuple(1.2 * value for value in values)), {}),
    "log-probabilities of the token before": (_sampled(lambda values: (values[0], *values[:-1])), {}),
    "NaN after the first token": (_sampled(lambda values: (values[0], *[math.nan] * (len(values) - 1))), {}),
    "prefill with an offset": (_scored(lambda value: value - 0.2), {}),
    "decoding with an offset": (_sampled(lambda values: tuple(value - 0.2 for value in values)), {}),
    "temperature ignored": (_wrapping("generate", _temperature_ignored), {}),
    "weights rounded to 4 bits": (_model(_rounded), {}),
    "another RoPE base": (_model(_other_theta), {}),
    "random weights": (_model(lambda model: model.model.layers[0].input_layernorm.weight.normal_()), {}),
    "another dtype": (_model(lambda model: model.to(torch.bfloat16)), {}),
    "a length limit that is too low": (_known(max_length=32), {}),
    "fewer embedding rows": (_known(vocabulary=300), {}),
    "an unknown option": (_nothing, {"engine_options": {"gpu_memory": "0.5"}}),
    "a device that does not exist": (_nothing, {"engine_options": {"device": "tpu9"}}),
    "an invalid length": (_nothing, {"engine_options": {"max_length": -1}}),
}
"""Faults of the engine of a Llama, with options of `certify`."""

VLLM: dict[str, tuple[Plant, dict[str, Any]]] = LLAMA | {
    "another epsilon in the engine": (_nothing, {"engine_options": {"hf_overrides": {"rms_norm_eps": 0.1}}}),
    "scaled positions in the engine": (
        _nothing,
        {"engine_options": {"hf_overrides": {"rope_parameters": {"rope_type": "linear", "factor": 4.0}}}},
    ),
    "a key-value cache in float8": (_nothing, {"engine_options": {"kv_cache_dtype": "fp8"}}),
    "another model in the engine": (_nothing, {"engine_options": {"model_impl": "silly"}}),
}
"""Faults of vLLM with a Llama. `LLAMA` has those that every engine can have."""
