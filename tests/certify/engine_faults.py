"""Faults of the engine: stale or wrong weights, dropped adapters, wrong options, wrong log-probabilities."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from nrl_models.engines.engine_types import Capabilities
from nrl_models.engines.hf import HFEngine
from nrl_models.logprobs.sampling import Sampling

Plant = Callable[[pytest.MonkeyPatch], None]


def _wrapping(name: str, wrong: Callable[..., Any]) -> Plant:
    """Replace a method of the engine. The trainer and the reference have the same class and stay correct."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        right = getattr(HFEngine, name)

        def method(self: HFEngine, *args: Any, **options: Any) -> Any:
            if self.name != "hf-generate":
                return right(self, *args, **options)
            return wrong(lambda *a, **o: right(self, *a, **o), *args, **options)

        patch.setattr(HFEngine, name, method)

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
        found = write(iter(buckets), digests)
        write(iter([[(name, change(name, tensor)) for name, tensor in bucket] for bucket in buckets]), False)
        return found

    return _wrapping("_refit", wrong)


def _exchanged(name: str, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flip(0) if name.endswith("layers.1.mlp.gate_proj.weight") else tensor


def _second_refit_ignored() -> Plant:
    def plant(patch: pytest.MonkeyPatch) -> None:
        right = HFEngine._refit

        def refit(self: HFEngine, sent: Any, digests: bool) -> Any:
            if self.version == 0:
                return right(self, sent, digests)
            kept = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
            found = right(self, sent, digests)
            self.model.load_state_dict(kept)
            return found

        patch.setattr(HFEngine, "_refit", refit)

    return plant


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

    def plant(patch: pytest.MonkeyPatch) -> None:
        right = HFEngine.start.__func__  # type: ignore[attr-defined]

        def start(cls: type[HFEngine], *args: Any, **options: Any) -> HFEngine:
            engine: HFEngine = right(cls, *args, **options)
            with torch.no_grad():
                change(engine.model)
            return engine

        patch.setattr(HFEngine, "start", classmethod(start))

    return plant


def _known(**values: Any) -> Plant:
    def plant(patch: pytest.MonkeyPatch) -> None:
        right = HFEngine.capabilities

        def capabilities(self: HFEngine) -> Capabilities:
            found = right(self)
            return replace(found, **values) if self.name == "hf-generate" else found

        patch.setattr(HFEngine, "capabilities", capabilities)

    return plant


def _rounded(model: Any) -> None:
    for parameter in model.parameters():
        if parameter.ndim == 2:
            scale = parameter.abs().amax() / 7
            parameter.copy_((parameter / scale).round() * scale)


def _other_theta(model: Any) -> None:
    rotary = model.model.rotary_emb
    rotary.inv_freq.mul_(0.5)


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
    "a refit writes rows in another order": (_written(_exchanged), {}),
    "a second refit is ignored": (_second_refit_ignored(), {}),
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
    "random weights": (_model(lambda model: model.model.layers[0].mlp.up_proj.weight.normal_()), {}),
    "another dtype": (_model(lambda model: model.to(torch.bfloat16)), {}),
    "a length limit that is too low": (_known(max_length=32), {}),
    "fewer embedding rows": (_known(vocabulary=300), {}),
    "an unknown option": (lambda patch: None, {"engine_options": {"gpu_memory": "0.5"}}),
    "a device that does not exist": (lambda patch: None, {"engine_options": {"device": "tpu9"}}),
    "an invalid length": (lambda patch: None, {"engine_options": {"max_length": -1}}),
}
"""Faults of the engine of a Llama, with options of `certify`."""
