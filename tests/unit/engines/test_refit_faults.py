"""Engines that fail in the middle of a refit: an EngineError, and a trainer and a new engine that work."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nrl_models.engines.base import NamedTensor
from nrl_models.engines.hf import HFEngine
from nrl_models.engines.vllm import VLLMEngine
from nrl_models.errors import EngineError
from nrl_models.logprobs import Sampling


class DyingLLM:
    """What `VLLMEngine` uses of vLLM. It dies in one call, and from then on every call of anything raises."""

    def __init__(self, dies_in: str, after: int = 0) -> None:
        self.dies_in, self.left, self.dead, self.calls = dies_in, after, False, []
        model = SimpleNamespace(logprobs_mode="processed_logprobs")
        self.llm_engine = SimpleNamespace(
            vllm_config=SimpleNamespace(model_config=model),
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
def test_an_engine_that_dies_in_a_refit(
    trainer: HFEngine, engine: HFEngine, prompts: list[list[int]], dies_in: str
) -> None:
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    expected = trainer.score(prompts, Sampling())
    llm = DyingLLM(dies_in, after=2 if dies_in == "nrl_refit_load" else 0)
    dying = VLLMEngine(llm)
    with pytest.raises(EngineError, match=r"vLLM failed: RuntimeError: EngineCore encountered an issue") as caught:
        dying.refit(trainer.model.state_dict_adapter.iter_export(trainer.model), bucket_bytes=2**16)
    assert ("refit it again" in str(caught.value)) == (dies_in == "nrl_refit_load")
    assert llm.calls[-1] == "nrl_refit_abandon"
    torch.testing.assert_close(dict(trainer.model.state_dict()), before, rtol=0, atol=0)
    engine.refit(trainer.model.state_dict_adapter.iter_export(trainer.model))
    for found, wanted in zip(engine.score(prompts, Sampling()), expected, strict=True):
        assert found[1:] == pytest.approx(wanted[1:], abs=1e-4)


def test_an_engine_whose_refit_was_cut_takes_the_next(
    trainer: HFEngine, checkpoint: Path, prompts: list[list[int]]
) -> None:
    """By an interruption of what gives the tensors, as Ctrl-C is."""

    def cut() -> Iterator[NamedTensor]:
        for number, pair in enumerate(trainer.model.state_dict_adapter.iter_export(trainer.model)):
            if number == 5:
                raise KeyboardInterrupt
            yield pair

    llm = DyingLLM("nothing")
    with pytest.raises(KeyboardInterrupt):
        VLLMEngine(llm).refit(cut(), bucket_bytes=1)
    assert llm.calls == ["nrl_refit_start", *["nrl_refit_load"] * 4, "nrl_refit_abandon"]
    engine = HFEngine.start(checkpoint, dtype=torch.float32, load_format="dummy", seed=3)
    with pytest.raises(KeyboardInterrupt):
        engine.refit(cut())
    report = engine.refit(trainer.model.state_dict_adapter.iter_export(trainer.model))
    assert report.unwritten == ()
    for found, wanted in zip(engine.score(prompts, Sampling()), trainer.score(prompts, Sampling()), strict=True):
        assert found[1:] == pytest.approx(wanted[1:], abs=1e-4)
