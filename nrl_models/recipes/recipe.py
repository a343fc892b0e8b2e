"""What a recipe says, in frozen dataclasses. The keys of a recipe's YAML are the names of their fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from nrl_models.errors import UnknownArgumentError, parse_option
from nrl_models.logprobs.sampling import Sampling
from nrl_models.losses.named import Loss, PolicyLoss
from nrl_models.recipes.gates import Gate

SUPERVISED_METRICS = ("loss", "gradient_norm", "tokens", "skipped_updates")
PAIR_METRICS = ("loss", "gradient_norm", "ordered", "margin", "tokens", "skipped_updates")
POLICY_METRICS = (
    "token_mult_prob_error",
    "kl_k3",
    "reward",
    "ended",
    "tokens",
    "groups",
    "loss",
    "gradient_norm",
    "clipped",
    "outside",
    "sample_seconds",
    "learn_seconds",
    "refit_seconds",
    "skipped",
    "skipped_updates",
)
"""What each step of a run measures, by kind of loss; docs/recipes.md says what they are."""


class Compute(StrEnum):
    """The dtype to compute in."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class Schedule(StrEnum):
    """How the learning rate changes over the steps."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"


class EngineName(StrEnum):
    """Inference engines that take new weights."""

    VLLM = "vllm"
    MLX = "mlx"
    HF_GENERATE = "hf-generate"


class EngineDtype(StrEnum):
    """The dtype of an inference engine."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class NonFinite(StrEnum):
    """What to do about a reward, an advantage or an engine's log-probability that is NaN or infinite."""

    RAISE = "raise"
    """Raise `NonFiniteError`, which names the row."""
    SKIP = "skip"
    """Drop the group of replies, and count it in the metric `skipped`."""


@dataclass(frozen=True, slots=True)
class Target:
    """A `_target_` and the keys beside it: a callable, and the keywords it gets.

    Args:
        name: as `_target_` names it.
        function: what that is.
        arguments: the keywords.
    """

    name: str
    function: Any
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """How any model is trained.

    Args:
        steps: updates of supervised losses; rounds of sampling, learning and refitting of RL.
        compute: the dtype to compute in; bfloat16 is torch's autocast over weights that stay as they are.
        schedule: of the learning rate, from that of the optimiser down to zero, unless it is constant.
        warmup: steps in which the learning rate rises.
        clip_gradient_norm: the largest norm of the gradient.
        activation_checkpointing: recompute activations in the backward.
        dropout: train with the model's dropout; without it by default, as engines and references compute.

    Raises:
        UnknownArgumentError: numbers that are too small; all of them.
        UnknownOptionError: an unknown dtype or schedule.
    """

    steps: int
    compute: Compute = Compute.FLOAT32
    schedule: Schedule = Schedule.CONSTANT
    warmup: int = 0
    clip_gradient_norm: float = 1.0
    activation_checkpointing: bool = False
    dropout: bool = False

    def __post_init__(self) -> None:
        """Check the numbers, and make enums of names."""
        object.__setattr__(self, "compute", parse_option(Compute, self.compute, "compute"))
        object.__setattr__(self, "schedule", parse_option(Schedule, self.schedule, "schedule"))
        own = {"warmup": 0, "clip_gradient_norm": 0}
        wrong = [
            f"{name}={value}: expected a number of at least {own.get(name, 1)}"
            for name in self.__dataclass_fields__
            if type(value := getattr(self, name)) in (int, float) and not value >= own.get(name, 1)
        ]
        if wrong:
            raise UnknownArgumentError("; ".join(wrong))


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisedTraining(Training):
    """How a model learns from given answers.

    Args:
        batch: sequences, or pairs, of a step.
        max_length: tokens of a sequence; what is longer is cut at its end.
        micro_batch: sequences, or pairs, of a forward; gradients of a step are summed over so many.
    """

    batch: int
    max_length: int
    micro_batch: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTraining(Training):
    """How a model learns from its own replies.

    Args:
        questions: of a step.
        group: replies to each question.
        max_prompt: tokens of a question; longer ones are not asked.
        new_tokens: tokens of a reply at most.
        updates: of the weights in a step; the questions are divided among them.
        row_tokens: tokens of a forward at most, several replies packed into it: activations grow with it. By default
            what `nrl_models.logprobs.rollout_logprobs` takes.
        on_non_finite: `raise` or `skip` groups with a reward, an advantage or an engine's log-probability that is NaN
            or infinite.
    """

    questions: int
    group: int
    max_prompt: int
    new_tokens: int
    updates: int = 1
    row_tokens: int | None = None
    on_non_finite: NonFinite = NonFinite.RAISE

    def __post_init__(self) -> None:
        """Check what only shows together."""
        Training.__post_init__(self)
        object.__setattr__(self, "on_non_finite", parse_option(NonFinite, self.on_non_finite, "on_non_finite"))
        wrong = []
        if self.questions % self.updates:
            wrong.append(f"updates={self.updates}: expected a divisor of the {self.questions} questions of a step")
        longest = self.max_prompt + self.new_tokens
        if self.row_tokens is not None and self.row_tokens < longest:
            wrong.append(f"row_tokens={self.row_tokens}: expected at least the {longest} of max_prompt and new_tokens")
        if wrong:
            raise UnknownArgumentError("; ".join(wrong))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """The inference engine that samples.

    Args:
        name: `vllm`, `mlx` or `hf-generate`: those that take new weights.
        dtype: to compute in; the checkpoint's by default.
        options: the engine's own, as `--engine-option` of other commands.

    Raises:
        UnknownOptionError: an unknown name or dtype.
    """

    name: EngineName
    dtype: EngineDtype | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Make enums of names."""
        object.__setattr__(self, "name", parse_option(EngineName, self.name, "engine.name"))
        if self.dtype is not None:
            object.__setattr__(self, "dtype", parse_option(EngineDtype, self.dtype, "engine.dtype"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """What every recipe says.

    Args:
        model: how the model is loaded; its `pretrained_model_name_or_path` is the tokenizer's and the engine's, too.
        loss: its `name`, and settings that differ from those it has by default.
        data: where rows come from.
        optimizer: of the parameters that are not frozen.
        training: the rest.
        backend: keywords of `nrl_models.BackendConfig`.
        freeze_config: see `nrl_models.freeze`.
        gates: what has to hold of the run's metrics.
        seed: of everything random.
    """

    model: Target
    loss: Loss
    data: Target
    optimizer: Target
    training: Training
    backend: Mapping[str, Any] = field(default_factory=dict)
    freeze_config: Mapping[str, bool] = field(default_factory=dict)
    gates: tuple[Gate, ...] = ()
    seed: int = 0

    @property
    def images(self) -> str | None:
        """The column with images that the data names; None if it names none."""
        return self.data.arguments.get("images") or None


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisedRecipe(Recipe):
    """A recipe of the losses `sft`, `dpo` and `reward`."""

    training: SupervisedTraining

    def __post_init__(self) -> None:
        """Check what only shows together."""
        if self.images:
            raise UnknownArgumentError("data.images: images are learnt from by grpo, dr_grpo and dapo alone")


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRecipe(Recipe):
    """A recipe of the losses `grpo`, `dr_grpo` and `dapo`.

    Args:
        reward: what a reply is worth.
        engine: samples.
        sampling: how.
    """

    loss: PolicyLoss
    training: PolicyTraining
    reward: Target
    engine: EngineSettings
    sampling: Sampling = field(default_factory=Sampling)

    def __post_init__(self) -> None:
        """Check what only shows together."""
        longest = self.training.new_tokens
        if self.loss.overlong_buffer > longest:
            raise UnknownArgumentError(
                f"loss.overlong_buffer={self.loss.overlong_buffer}: expected at most training.new_tokens, {longest}"
            )
        if self.images and self.engine.name is not EngineName.HF_GENERATE:
            raise UnknownArgumentError(
                f"engine.name={str(self.engine.name)!r} takes token ids alone here, and data.images={self.images!r} "
                "asks about images: expected hf-generate"
            )
        if self.sampling.greedy:
            raise UnknownArgumentError(
                "sampling.temperature=0: all replies of a group would be the same; expected a number above 0"
            )
