"""A small RL loop with a watch, and hooks for faults."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import LlamaConfig, PreTrainedConfig

from nrl_models import AutoModelForCausalLM, Sample, Sampling, rollout_logprobs
from nrl_models.engines.engine_types import NamedTensor
from nrl_models.engines.hf import HFEngine
from nrl_models.testing.case import randomize
from nrl_models.testing.tiny import tiny_config
from nrl_models.watch import StepReport, Watch

PROMPTS = [[21, 22, 23, 24, 25], [31, 32, 33, 34, 35, 36, 37], [41, 42, 43]]
NEW_TOKENS = 12


class FaultyEngine(HFEngine):
    """An engine with replaceable parts.

    Attributes:
        before_generate: Called before each generation.
        sampling: Replaces the requested sampling parameters.
        change_samples: Changes the returned samples.
        keeps: Whether a refit does not change the tensor of this name, but reports that it was written.
        ignores_refits: Whether refits change nothing.
    """

    before_generate: Callable[[], None] = staticmethod(lambda: None)
    sampling: Sampling | None = None
    change_samples: Callable[[list[Sample]], list[Sample]] = staticmethod(lambda samples: samples)
    keeps: Callable[[str], bool] = staticmethod(lambda name: False)

    def _generate(self, prompts: Any, sampling: Any, **options: Any) -> list[Sample]:
        self.before_generate()
        return self.change_samples(super()._generate(prompts, self.sampling or sampling, **options))

    def _refit(self, sent: Iterator[list[NamedTensor]], digests: bool) -> dict[str, Any]:
        unwritten = {name: tensor.clone() for name, tensor in self.model.state_dict().items() if self.keeps(name)}
        report = super()._refit(sent, digests)
        state_dict = self.model.state_dict()
        for name, tensor in unwritten.items():
            state_dict[name].copy_(tensor)
        return report


class Loop:
    """Sample, compare, train and refit.

    Args:
        config: The model's configuration. Default: a tiny Llama.
        learning_rate: Learning rate of SGD, large enough that every step is visible.
        wrap: Wraps the trainer's model, for example with PEFT.
        watch_options: Options of `Watch`.
    """

    def __init__(
        self,
        config: PreTrainedConfig | None = None,
        *,
        learning_rate: float = 0.05,
        wrap: Callable[[Any], Any] = lambda model: model,
        **watch_options: Any,
    ) -> None:
        config = config or tiny_config(LlamaConfig)
        torch.manual_seed(0)
        plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        randomize(plain)
        served = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        served.load_state_dict(plain.state_dict())
        self.model = wrap(plain)
        self.engine = FaultyEngine(served)
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.SGD(parameters, lr=learning_rate)
        self.sampling = watch_options.get("sampling", Sampling())
        self.versions: list[int] | None = None
        self.tensors: Callable[[], Any] = lambda: None
        self.watch = Watch(self.model, self.engine, **watch_options)
        self.steps = 0

    def sample(self, prompts: Sequence[Sequence[int]] = PROMPTS) -> list[Sample]:
        return self.engine.generate(prompts, self.sampling, max_new_tokens=NEW_TOKENS, seed=self.steps)

    def logprobs(self, samples: Sequence[Sample], **options: Any) -> Any:
        score = [[False] * len(sample.prompt) + [True] * len(sample.tokens) for sample in samples]
        processing = self.sampling.processing
        return rollout_logprobs(
            self.model,
            [sample.sequence for sample in samples],
            score=score,
            temperature=processing.temperature,
            top_k=processing.top_k,
            top_p=processing.top_p,
            **options,
        )

    def step(self) -> StepReport:
        """Run one step. Raises the watch's findings."""
        self.steps += 1
        samples = self.sample()
        self.optimizer.zero_grad()
        scores = self.logprobs(samples, loss=lambda result: -(result.logprobs * result.mask).sum() / 50)
        report = self.watch.before_update(samples, scores.logprobs, versions=self.versions)
        self.optimizer.step()
        self.watch.refit(self.tensors())
        return report


def with_logprobs(sample: Sample, logprobs: torch.Tensor) -> Sample:
    return replace(sample, logprobs=tuple(logprobs.tolist()))
