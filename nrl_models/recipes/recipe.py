"""Frozen dataclasses of a recipe. The keys of a recipe's YAML are the names of their fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from nrl_models.errors import UnknownArgumentError, parse_option
from nrl_models.logprobs.sampling import Sampling
from nrl_models.losses.named import NamedLoss, PolicyLoss
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
    "drift",
)
"""Metrics of each step, by kind of loss. docs/recipes.md defines them."""


class Compute(StrEnum):
    """The dtype to compute in."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class LearningRateSchedule(StrEnum):
    """How the learning rate changes over the steps."""

    CONSTANT = "constant"
    LINEAR = "linear"
    COSINE = "cosine"


class EngineName(StrEnum):
    """Inference engines that accept new weights."""

    VLLM = "vllm"
    VLLM_TRANSFORMERS = "vllm-transformers"
    MLX = "mlx"
    HF_GENERATE = "hf-generate"


class EngineDtype(StrEnum):
    """The dtype of an inference engine."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class NonFinite(StrEnum):
    """Treatment of a reward, an advantage or an engine's log-probability that is NaN or infinite."""

    RAISE = "raise"
    """Raise `NonFiniteError`, which names the row."""
    SKIP = "skip"
    """Drop the group of completions, and count it in the metric `skipped`."""


@dataclass(frozen=True, slots=True)
class Target:
    """A `_target_` with its sibling keys: a callable and its keyword arguments.

    Args:
        name: Value of `_target_`.
        function: The callable with that name.
        arguments: Keyword arguments.
    """

    name: str
    function: Any
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """Training settings for all losses.

    Args:
        steps: Number of updates for supervised losses; number of rounds of sampling, training and refitting for RL.
        compute: Compute dtype. bfloat16 uses torch's autocast and does not change the weights' dtype.
        schedule: Learning-rate schedule: decays from the optimizer's learning rate to zero, unless constant.
        warmup: Number of steps in which the learning rate increases from zero, with any schedule. As in transformers,
            it is zero in the first step.
        clip_gradient_norm: Maximum gradient norm; 0 for no clipping, as in transformers.
        activation_checkpointing: Whether to recompute activations in the backward.
        dropout: Whether to train with the model's dropout. Engines and references compute without.

    Raises:
        UnknownArgumentError: If numbers are too small. Lists all of them.
        UnknownOptionError: If the dtype or schedule is unknown.
    """

    steps: int
    compute: Compute = Compute.FLOAT32
    schedule: LearningRateSchedule = LearningRateSchedule.CONSTANT
    warmup: int = 0
    clip_gradient_norm: float = 1.0
    activation_checkpointing: bool = False
    dropout: bool = False

    def __post_init__(self) -> None:
        """Check the numbers, and make enums of names."""
        object.__setattr__(self, "compute", parse_option(Compute, self.compute, "compute"))
        object.__setattr__(self, "schedule", parse_option(LearningRateSchedule, self.schedule, "schedule"))
        minimums = {"warmup": 0, "clip_gradient_norm": 0}
        wrong = [
            f"{name}={value}: expected a number of at least {minimums.get(name, 1)}"
            for name in self.__dataclass_fields__
            if type(value := getattr(self, name)) in (int, float) and not value >= minimums.get(name, 1)
        ]
        if wrong:
            raise UnknownArgumentError("; ".join(wrong))


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisedTraining(Training):
    """Training settings for supervised losses.

    Args:
        batch: Sequences or pairs per step.
        max_length: Maximum number of tokens of a sequence. Longer ones are truncated, and skipped if no answer is left.
        micro_batch: Sequences or pairs per forward. Gradients of a step are accumulated.
    """

    batch: int
    max_length: int
    micro_batch: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTraining(Training):
    """Training settings for RL on sampled completions.

    Args:
        questions: Questions per step.
        group: Completions per question.
        max_prompt: Maximum number of tokens of a question. Longer questions are skipped.
        new_tokens: Maximum number of tokens of a completion.
        updates: Weight updates per step. The questions are divided among them.
        row_tokens: Maximum number of tokens per forward pass. Several completions are packed into it. More tokens need
            more memory for activations. Default: see `nrl_models.logprobs.rollout_logprobs`.
        on_non_finite: `raise` an error for, or `skip`, groups with a reward, an advantage or an engine's
            log-probability that is NaN or infinite.
    """

    questions: int
    group: int
    max_prompt: int
    new_tokens: int
    updates: int = 1
    row_tokens: int | None = None
    on_non_finite: NonFinite = NonFinite.RAISE

    def __post_init__(self) -> None:
        """Check combinations of fields."""
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
    """The inference engine for sampling.

    Args:
        name: `vllm`, `vllm-transformers`, `mlx` or `hf-generate`, which accept new weights.
        dtype: Compute dtype. Default: the checkpoint's.
        options: Options of the engine, as for `--engine-option` in other commands.

    Raises:
        UnknownOptionError: If the name or dtype is unknown.
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
class WatchSettings:
    """Options of `nrl_models.watch.Watch`.

    Args:
        fail: stop the run before the next update if trainer and engine differ. Otherwise differences are logged, and
            counted in the metric `drift`.
        probe_every: run the probes after every n-th refit; 0: only if rollouts differ.

    Raises:
        UnknownArgumentError: `probe_every` is negative.
    """

    fail: bool = True
    probe_every: int = 1

    def __post_init__(self) -> None:
        """Check the number."""
        if self.probe_every < 0:
            raise UnknownArgumentError(f"watch.probe_every={self.probe_every}: expected at least 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Fields of every recipe.

    Args:
        model: Loader of the model. Tokenizer and engine use the same `pretrained_model_name_or_path`.
        loss: The `name` of the loss, and settings that differ from its defaults.
        data: Source of the rows.
        optimizer: Optimizer of the parameters that are not frozen.
        training: Number of steps, batch size and further settings.
        backend: Keywords of `nrl_models.BackendConfig`.
        freeze_config: Parts to freeze; see `nrl_models.freeze`.
        gates: Bounds that the run's metrics must satisfy.
        seed: Random seed.
    """

    model: Target
    loss: NamedLoss
    data: Target
    optimizer: Target
    training: Training
    backend: Mapping[str, Any] = field(default_factory=dict)
    freeze_config: Mapping[str, bool] = field(default_factory=dict)
    gates: tuple[Gate, ...] = ()
    seed: int = 0

    @property
    def images(self) -> str | None:
        """Name of the data's image column; None if there is none."""
        return self.data.arguments.get("images") or None


@dataclass(frozen=True, slots=True, kw_only=True)
class SupervisedRecipe(Recipe):
    """A recipe of the losses `sft`, `dpo` and `reward`."""

    training: SupervisedTraining

    def __post_init__(self) -> None:
        """Check combinations of fields."""
        if self.images:
            raise UnknownArgumentError("data.images: only grpo, dr_grpo and dapo support images")


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyRecipe(Recipe):
    """A recipe of the losses `grpo`, `dr_grpo` and `dapo`.

    Args:
        reward: Function that scores a completion.
        engine: Engine that samples completions.
        sampling: Temperature and truncation.
        watch: Comparison of trainer and engine in every step; None for no watch.
    """

    loss: PolicyLoss
    training: PolicyTraining
    reward: Target
    engine: EngineSettings
    sampling: Sampling = field(default_factory=Sampling)
    watch: WatchSettings | None = None

    def __post_init__(self) -> None:
        """Check combinations of fields."""
        longest = self.training.new_tokens
        if self.loss.overlong_buffer > longest:
            raise UnknownArgumentError(
                f"loss.overlong_buffer={self.loss.overlong_buffer}: expected at most training.new_tokens, {longest}"
            )
        if self.images and self.engine.name is not EngineName.HF_GENERATE:
            raise UnknownArgumentError(
                f"engine.name={str(self.engine.name)!r} accepts only token ids here, but data.images={self.images!r} "
                "adds images: expected hf-generate"
            )
        if self.watch is not None and self.training.dropout:
            raise UnknownArgumentError(
                "watch: with training.dropout=true the trainer's log-probabilities differ from the engine's; expected "
                "training.dropout=false"
            )
        if self.sampling.greedy:
            raise UnknownArgumentError(
                "sampling.temperature=0: all completions of a group would be equal; expected a number above 0"
            )
