"""A step of RL: the engine samples completions, the model is trained on them, and the engine gets the new weights.

Each step measures how far engine and trainer differ in the log-probabilities of the sampled tokens. A refit that leaves
a weight of the engine unwritten raises an error.

With `top_k` or `top_p`, the trainer's distribution may exclude a token that the engine sampled. Such a token has no
log-probability. The loss and all metrics except `outside` ignore it. The reference model is never truncated.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import Any

import torch

from nrl_models.common.forward.evaluation import autocast, evaluating
from nrl_models.common.logs import get_logger
from nrl_models.common.value_checks import is_integer
from nrl_models.engines.base import Engine
from nrl_models.engines.engine_types import Sample
from nrl_models.errors import NonFiniteError, UnknownArgumentError, parse_option, shown
from nrl_models.logprobs import LossTerms, Sampling, TokenLogprobs, kl_k3, rollout_logprobs, token_mult_prob_error
from nrl_models.losses import (
    Normalize,
    RatioLevel,
    clipped_share,
    importance_weights,
    overlong_penalty,
    policy_loss,
    teaching_groups,
    token_weights,
)
from nrl_models.losses.named import PolicyLoss
from nrl_models.losses.rewards import unchecked_advantages
from nrl_models.recipes.policy_batch import Question, Rollouts, SampleBatch, finite_groups
from nrl_models.recipes.recipe import NonFinite
from nrl_models.recipes.weight_updates import clipped_update
from nrl_models.watch import Watch

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoop:
    """Performs the steps of RL training.

    Args:
        model: The model to train.
        optimizer: Optimizer of the model's parameters.
        engine: Engine that samples and accepts new weights.
        tokenizer: The checkpoint's tokenizer.
        reward: Function of a question's row, a completion's text without special tokens, and whether the model ended
            it.
        settings: Settings of the loss.
        group: Completions per question.
        new_tokens: Maximum number of tokens of a completion.
        sampling: Temperature and truncation.
        updates: Weight updates per step. The questions are divided among them.
        row_tokens: Maximum number of tokens of a forward, see `rollout_logprobs`.
        clip_gradient_norm: Maximum gradient norm of an update.
        reference: Reference model of `settings.kl`.
        compute: Compute dtype. bfloat16 uses autocast.
        dropout: Whether the policy's log-probabilities use dropout if the model is in training mode.
        on_non_finite: Handling of a reward, an advantage or an engine's log-probability that is NaN or infinite.
        watch: Comparison of trainer and engine before the first update of a step. It also refits the engine. None
            for no watch.

    Raises:
        UnknownArgumentError: If `group`, `new_tokens` or `updates` is not a whole number above 0.
        UnknownOptionError: If `on_non_finite` is not a `NonFinite`.
    """

    model: Any
    optimizer: torch.optim.Optimizer
    engine: Engine
    tokenizer: Any
    reward: Callable[[Any, str, bool], float]
    settings: PolicyLoss
    group: int
    new_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    updates: int = 1
    row_tokens: int | None = None
    clip_gradient_norm: float = 1.0
    reference: Any = None
    compute: torch.dtype = torch.float32
    dropout: bool = False
    on_non_finite: NonFinite = NonFinite.RAISE
    watch: Watch | None = None

    def __post_init__(self) -> None:
        """Check the numbers, and make an enum of a name."""
        for name in ("group", "new_tokens", "updates"):
            if not is_integer(getattr(self, name), 1):
                raise UnknownArgumentError(f"{name}={shown(getattr(self, name))}: expected a whole number above 0")
        object.__setattr__(self, "on_non_finite", parse_option(NonFinite, self.on_non_finite, "on_non_finite"))

    def step(self, questions: Iterator[Question], count: int, seed: int) -> dict[str, float]:
        """Sample completions, train on them, and refit the engine.

        Args:
            questions: Questions. Dynamic sampling may use more than `count` of them.
            count: Number of groups to train on.
            seed: Random seed of the sampling.

        Returns:
            The metrics in `nrl_models.recipes.recipe.POLICY_METRICS` that have a value: `reward` needs a finite reward,
            `loss` a group to train on. Differences between engine and trainer refer to the weights of the previous
            refit.

        Raises:
            DriftError: If trainer and engine differ, and the watch fails.
            EngineError: If the engine fails, or keeps an old weight (`MixedWeightsError`).
            NonFiniteError: If a value is NaN or infinite, and `on_non_finite` is not `skip`.
        """
        started = time.perf_counter()
        known = 0 if self.watch is None else len(self.watch.findings)
        rollouts = self.roll_out(questions, count, seed)
        sampled_at = time.perf_counter()
        metrics = self.learn(rollouts)
        learned_at = time.perf_counter()
        if self.watch is None:
            report = self.engine.refit(self.model.state_dict_adapter.iter_export(self.model), digests=False)
        else:
            report = self.watch.refit()
        finite = rollouts.rewards[rollouts.rewards.isfinite()]
        if len(finite):
            metrics["reward"] = finite.mean().item()
        return metrics | {
            "ended": rollouts.ended,
            "tokens": rollouts.tokens,
            "groups": float(len(rollouts.samples) // self.group),
            "skipped": rollouts.skipped + metrics.get("skipped", 0.0),
            "sample_seconds": sampled_at - started,
            "learn_seconds": learned_at - sampled_at,
            "refit_seconds": report.seconds,
            "drift": float(0 if self.watch is None else len(self.watch.findings) - known),
        }

    def sample(self, asked: Sequence[Question], seed: int) -> list[Sample]:
        """Sample a completion of each question, up to an end-of-text token."""
        prompts = [question.prompt for question in asked]
        return self.engine.generate(
            prompts,
            self.sampling,
            max_new_tokens=self.new_tokens,
            seed=seed,
            ignore_end=False,
            model_inputs=[question.model_inputs for question in asked],
        )

    def roll_out(self, questions: Iterator[Question], count: int, seed: int) -> Rollouts:
        """Sample groups of completions for `count` questions. Dynamic sampling drops groups with equal rewards.

        Raises:
            NonFiniteError: If a value is NaN or infinite, and `on_non_finite` is not `skip`.
        """
        settings = self.settings
        retained: list[Sample] = []
        advantages, rewards = [], []
        ended = tokens = completions = skipped = 0
        for batch in range(max(1, settings.dynamic_sampling)):
            asked = list(islice(questions, count))
            repeated = [question for question in asked for _ in range(self.group)]
            samples = self.sample(repeated, seed + batch)
            scores = [self._reward(*pair) for pair in zip(repeated, samples, strict=True)]
            raw_rewards = torch.tensor(scores, dtype=torch.float32)
            rewards.append(raw_rewards.view(-1, self.group))
            ended += sum(sample.finish_reason == "stop" for sample in samples)
            tokens += sum(len(sample.tokens) for sample in samples)
            completions += len(samples)
            rows = [question.row for question in repeated]
            shaped = raw_rewards
            if settings.overlong_buffer:
                lengths = torch.tensor([len(sample.tokens) for sample in samples])
                shaped = raw_rewards + overlong_penalty(
                    lengths, self.new_tokens, settings.overlong_buffer, settings.overlong_penalty
                )
            finite = rewards[-1].isfinite().all(1, keepdim=True)
            batch_advantages = unchecked_advantages(
                shaped.view(-1, self.group).where(finite, 0.0), scale=settings.scale_rewards
            )
            values = {"reward": raw_rewards, "advantage": batch_advantages.flatten()}
            usable = finite_groups(samples, self.group, self.on_non_finite, values, rows)
            skipped += int((~usable).sum())
            teach = usable.clone()
            if settings.dynamic_sampling:
                teach[usable] = teaching_groups(rewards[-1][usable])
            for index in teach.nonzero()[:, 0].tolist()[: count - len(retained) // self.group]:
                retained += samples[index * self.group : (index + 1) * self.group]
                advantages.append(batch_advantages[index])
            if len(retained) == count * self.group:
                break
        else:
            logger.warning(
                f"{len(retained) // self.group} of {count} groups have rewards that differ and are finite, after "
                f"{batch + 1} batches of questions: the step uses only those. Use easier or harder questions, or "
                "larger groups, for more."
            )
        return Rollouts(
            retained,
            torch.cat(advantages) if advantages else torch.zeros(0, dtype=torch.float32),
            torch.cat(rewards),
            ended / completions,
            tokens / completions,
            skipped,
        )

    def _reward(self, question: Question, sample: Sample) -> float:
        completion = self.tokenizer.decode(sample.tokens, skip_special_tokens=True)
        reward = self.reward(question.row, completion, sample.finish_reason == "stop")
        try:
            return float(reward)
        except (TypeError, ValueError, OverflowError) as error:
            raise NonFiniteError(
                f"the reward of a completion of {shown(question.row)} is {shown(reward)}: expected a number"
            ) from error

    def learn(self, rollouts: Rollouts) -> dict[str, float]:
        """Run the updates of a step. Returns no metrics if there is nothing to train on.

        An update whose gradient norm is NaN or infinite is skipped, and counted in `skipped_updates`.

        Raises:
            NonFiniteError: If a value is NaN or infinite, and `on_non_finite` is not `skip`.
        """
        values = {"advantage": rollouts.advantages}
        usable = finite_groups(rollouts.samples, self.group, self.on_non_finite, values)
        usable_samples = usable.repeat_interleave(self.group)
        samples = [sample for sample, keep in zip(rollouts.samples, usable_samples.tolist(), strict=True) if keep]
        skipped = {"skipped": float((~usable).sum())}
        if not samples:
            return skipped
        models = [nullcontext() if self.dropout else evaluating(self.model)]
        models += [nullcontext() if self.reference is None else evaluating(self.reference)]
        with models[0], models[1]:
            return self._updates(samples, rollouts.advantages[usable_samples].to(self.model.device)) | skipped

    def _updates(self, samples: Sequence[Sample], advantages: torch.Tensor) -> dict[str, float]:
        groups = len(samples) // self.group
        updates = min(self.updates, groups)
        bounds = [groups * number // updates * self.group for number in range(updates + 1)]
        parts = [slice(*bound) for bound in pairwise(bounds)]
        batches = [SampleBatch.of(samples[part], self.model.device) for part in parts]
        old: list[TokenLogprobs | None] = [None]
        # Later updates are measured against the policy that the step began with. The first one starts from it.
        old += [self._logprobs(self.model, batch, self.sampling) for batch in batches[1:]]
        steps: list[dict[str, Any]] = []
        for batch, part, before in zip(batches, parts, old, strict=True):
            self.optimizer.zero_grad()
            measured = self._gradient(batch, advantages[part], before)
            if self.watch is not None and not steps:
                self.watch.before_update(
                    samples[part], measured["logprobs"], engine=batch.logprobs, mask=measured["compared"]
                )
            steps.append(measured | clipped_update(self.model, self.optimizer, self.clip_gradient_norm))
        trainer, engine = (torch.cat([step[name] for step in steps]) for name in ("trainer", "engine"))
        means = {name: float(sum(step[name] for step in steps)) / updates for name in _AVERAGED}
        sums = {name: float(sum(step[name] for step in steps)) for name in ("outside", "skipped_updates")}
        return (
            means
            | sums
            | {
                "token_mult_prob_error": token_mult_prob_error(trainer, engine),
                "kl_k3": kl_k3(trainer, engine),
            }
        )

    def _gradient(self, batch: SampleBatch, advantages: torch.Tensor, old: TokenLogprobs | None) -> dict[str, Any]:
        """Compute the gradient of an update, and the measurements.

        Args:
            batch: The samples.
            advantages: `(samples,)`.
            old: Log-probabilities of the policy at the start of the step. None in the first update, in which they equal
                the current ones.
        """
        settings = self.settings
        clip: dict[str, Any] = {"eps_low": settings.eps_low, "eps_high": settings.eps_high}
        longest = self.new_tokens if settings.normalize is Normalize.LONGEST else None
        weights = token_weights(batch.sampled, settings.normalize, longest)
        reference = None
        if settings.kl:  # of the complete distribution: a token that its own top_p excludes is not certain
            reference = self._logprobs(self.reference, batch, Sampling(self.sampling.temperature)).logprobs
        correction, terms = settings.correction, LossTerms.TOKEN
        if correction is not None and correction.level is RatioLevel.SEQUENCE and old is None:
            terms = LossTerms.SEQUENCE  # the ratio of a sequence needs all its log-probabilities of this forward

        def arguments(statistics: TokenLogprobs) -> tuple[torch.Tensor, ...]:
            before = statistics.logprobs.detach() if old is None else old.logprobs
            return statistics.logprobs, before, advantages, weights * in_support(statistics)

        def in_support(statistics: TokenLogprobs) -> torch.Tensor:
            return statistics.mask if old is None else statistics.mask & old.mask

        def loss_of(statistics: TokenLogprobs) -> torch.Tensor:
            loss_arguments = arguments(statistics)
            _, before, _, counted = loss_arguments
            weighed = None
            if correction is not None:
                weighed = importance_weights(before, batch.logprobs, counted > 0, correction)
            return policy_loss(*loss_arguments, **clip, correction=weighed, reference=reference, kl=settings.kl)

        statistics = self._logprobs(self.model, batch, self.sampling, loss=loss_of, loss_terms=terms)
        assert statistics.loss is not None
        compared = batch.sampled & in_support(statistics)
        return {
            "loss": statistics.loss.item(),
            "clipped": clipped_share(*arguments(statistics), **clip),
            "outside": int((batch.sampled & ~in_support(statistics)).sum()),
            "logprobs": arguments(statistics)[1],
            "compared": compared,
            "trainer": arguments(statistics)[1][compared],
            "engine": batch.logprobs[compared],
        }

    def _logprobs(self, model: Any, batch: SampleBatch, sampling: Sampling, **loss: Any) -> TokenLogprobs:
        """Compute log-probabilities of the sampled tokens, `(batch, max_length)`, and the gradient of a loss."""
        sampling = sampling.processing
        with autocast(self.model.device, self.compute):
            return rollout_logprobs(
                model, batch.sequences, score=batch.score, row_tokens=self.row_tokens, model_inputs=batch.model_inputs,
                temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p, **loss,
            )  # fmt: skip


_AVERAGED = ("loss", "gradient_norm", "clipped")
