"""Run a recipe: load the model, engine and data, take the training steps, and check the gates."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from nrl_models.common.backend import BackendConfig
from nrl_models.common.checkpoint.local_path import as_path
from nrl_models.common.checkpoint.resolve_folder import folder_without_weights, resolve_folder
from nrl_models.common.checkpoint.writing import folder_to_write, require_replaceable
from nrl_models.common.logs import get_logger
from nrl_models.common.model_components.freezing import freeze, trainable_parameters
from nrl_models.common.upstream import ENABLE_CHECKPOINTING
from nrl_models.engines import start_engine
from nrl_models.errors import Problem, ProblemKind, RecipeError
from nrl_models.inputs.processors import load_processor
from nrl_models.inputs.tokenizers import load_tokenizer
from nrl_models.losses.named import PolicyLoss, PreferenceLoss, RankingLoss
from nrl_models.parity.parity_report import Outcome, passed_line
from nrl_models.recipes.data_sets.sources import refused
from nrl_models.recipes.gates import GateResult
from nrl_models.recipes.image_prompts import image_prompt
from nrl_models.recipes.policy_batch import Question
from nrl_models.recipes.recipe import LearningRateSchedule, PolicyRecipe, Recipe, SupervisedRecipe, Training
from nrl_models.recipes.rollouts import PolicyLoop
from nrl_models.recipes.rows import Row, prompt_ids, sequences_of
from nrl_models.recipes.supervised import Sequences, SupervisedLoop
from nrl_models.watch import Watch

if TYPE_CHECKING:
    from rich.table import Table

logger = get_logger(__name__)

Note = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Run:
    """Results of a run.

    Args:
        steps: Metrics of each step.
        verdicts: Verdicts of the recipe's gates.
    """

    steps: list[dict[str, float]] = field(default_factory=list)
    verdicts: list[GateResult] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether all gates passed."""
        return all(verdict.passed for verdict in self.verdicts)

    @property
    def summary(self) -> str:
        """The result in one line: the number of gates that passed."""
        if not self.verdicts:
            return "PASS: the recipe has no gates"
        passed = sum(verdict.passed for verdict in self.verdicts)
        return passed_line(self.passed, passed, len(self.verdicts), "gates")

    def table(self) -> Table:
        """Return a table of the gates and the other metrics of the last step."""
        from rich.table import Table

        table = Table(title=f"{len(self.steps)} steps", title_justify="left")
        for heading in ("what", "verdict", "measured", "expected"):
            table.add_column(heading)
        for verdict in self.verdicts:
            gate, outcome = verdict.gate, Outcome.of(verdict.passed).markup
            table.add_row(gate.measure, outcome, f"{verdict.value:.7g}", f"{gate.relation} {gate.bound:g}")
        bounded = {verdict.gate.measure for verdict in self.verdicts}
        for name, value in self.steps[-1].items() if self.steps else ():
            if (measure := f"last({name})") not in bounded:
                table.add_row(measure, "", f"{value:.7g}", "")
        return table

    def to_json(self) -> dict[str, Any]:
        """Return gates and steps for JSON. NaN and infinity become None."""
        from nrl_models.common.value_checks import finite_or_none

        return {
            "passed": self.passed,
            "gates": [
                {
                    "gate": str(verdict.gate),
                    "value": finite_or_none(verdict.value),
                    "relation": verdict.gate.relation,
                    "bound": verdict.gate.bound,
                    "unit": verdict.gate.metric,
                    "passed": verdict.passed,
                }
                for verdict in self.verdicts
            ],
            "steps": finite_or_none(self.steps),
        }


def train(
    recipe: Recipe, *, out: str | Path | None = None, overwrite: bool = False, note: Note = lambda line: None
) -> Run:
    """Run a recipe in this process.

    Args:
        recipe: See `read_recipe`.
        out: Directory for the trained model and its tokenizer. Not saved by default.
        overwrite: Whether to replace a checkpoint in `out`.
        note: Called with a line of text for each step.

    Raises:
        CheckpointError: If `out` is the checkpoint to train, or has a checkpoint and `overwrite` is False.
        NRLModelsError: If loading, the data or the engine fails.
    """
    random.seed(recipe.seed)
    torch.manual_seed(recipe.seed)
    training = recipe.training
    arguments = dict(recipe.model.arguments)
    path = arguments.pop("pretrained_model_name_or_path")
    target = None if out is None else folder_to_write(out)
    if target is not None:
        require_replaceable(as_path(path) / arguments.get("subfolder", ""), target, overwrite=overwrite)
    small_files = folder_without_weights(
        path, revision=arguments.get("revision"), subfolder=arguments.get("subfolder", "")
    )
    tokenizer = load_tokenizer(small_files)
    if tokenizer is None:
        detail = f"the checkpoint in {small_files} has no tokenizer files: save its tokenizer to this directory"
        raise RecipeError("cannot train", [Problem(ProblemKind.FILE, "tokenizer", detail)])
    processor = load_processor(small_files) if recipe.images else None
    rows = recipe.data.function(**recipe.data.arguments)
    encode = _encoder(recipe, tokenizer, processor)
    encode(next(shuffled(rows, recipe.seed)))  # raises before the model is loaded
    # Resolved once, so that model, reference and engine have the same version.
    folder = resolve_folder(path, revision=arguments.pop("revision", None), subfolder=arguments.pop("subfolder", ""))
    if target is not None:
        require_replaceable(folder, target, overwrite=True)  # in the hub's cache
    note(f"loading {path}")
    load = partial(recipe.model.function, folder, backend=BackendConfig(**recipe.backend), **arguments)
    model: Any = load().train()
    if isinstance(recipe.loss, RankingLoss) and model.num_labels != 1:
        detail = (
            f"outputs {model.num_labels} scores; a reward model outputs 1. To train one from a base model, add "
            "model.num_labels=1 model.strict=false, which initializes the missing weights"
        )
        raise RecipeError("cannot train", [Problem(ProblemKind.CONFIG, "model", detail)])
    if recipe.freeze_config:
        freeze(model, recipe.freeze_config)
    if training.activation_checkpointing:
        getattr(model, ENABLE_CHECKPOINTING)({"use_reentrant": False})
    optimizer = recipe.optimizer.function(trainable_parameters(model), **recipe.optimizer.arguments)
    loss = recipe.loss
    keeps_reference = isinstance(loss, PreferenceLoss) or (isinstance(loss, PolicyLoss) and loss.kl > 0)
    common = {
        "model": model,
        "optimizer": optimizer,
        "settings": loss,
        "clip_gradient_norm": training.clip_gradient_norm,
        "compute": getattr(torch, training.compute),
        "dropout": training.dropout,
        "reference": load().eval().requires_grad_(False) if keeps_reference else None,
    }
    schedule = learning_rate_schedule(optimizer, training)
    run = Run()
    steps = _policy_steps if isinstance(recipe, PolicyRecipe) else _supervised_steps
    for measured in steps(recipe, _encoded(shuffled(rows, recipe.seed), encode), tokenizer, folder, common):
        run.steps.append(measured)
        schedule.step()
        shown = "  ".join(f"{name} {value:.6g}" for name, value in measured.items())
        note(f"step {len(run.steps)}/{training.steps}: {shown}")
    run.verdicts.extend(gate.check(run.steps) for gate in recipe.gates)
    if target is not None:
        model.save_pretrained(target)
        (processor or tokenizer).save_pretrained(target)
    return run


def learning_rate_schedule(optimizer: torch.optim.Optimizer, training: Training) -> torch.optim.lr_scheduler.LambdaLR:
    """Create transformers' schedule with warmup."""
    from transformers import get_scheduler

    is_constant = training.schedule is LearningRateSchedule.CONSTANT
    name = "constant_with_warmup" if is_constant else training.schedule  # `constant` ignores the warmup
    return get_scheduler(
        name=name, optimizer=optimizer, num_warmup_steps=training.warmup, num_training_steps=training.steps
    )


def shuffled(rows: Sequence[Row], seed: int) -> Iterator[Row]:
    """Yield rows in random order without end. Every row occurs once per pass."""
    order = random.Random(seed)
    while True:
        yield from (rows[index] for index in order.sample(range(len(rows)), len(rows)))


MOST_SKIPPED = 10_000
"""Maximum number of consecutive rows without anything to train on before a run fails."""


def _encoded(rows: Iterator[Row], encode: Callable[[Row], Any]) -> Iterator[Any]:
    """Encode rows, and skip rows whose encoding is None. The first skipped row is logged."""
    skipped = 0
    for row in rows:
        encoding = encode(row)
        skipped = 0 if encoding is not None else skipped + 1
        if encoding is not None:
            yield encoding
        elif skipped == MOST_SKIPPED:
            raise RecipeError("cannot use the data", [Problem(ProblemKind.CONFIG, "training", _TOO_LONG)])
        else:
            logger.warning_once("some rows are longer than the recipe allows: they are skipped")


_TOO_LONG = f"{MOST_SKIPPED:,} rows one after the other are longer than max_prompt, or max_length, allows"


def _encoder(recipe: Recipe, tokenizer: Any, processor: Any) -> Callable[[Row], Any]:
    """Return the function that converts a row to its `Sequences` or `Question`, or to None if it is too long."""
    if isinstance(recipe, PolicyRecipe):
        return partial(_question, recipe.training.max_prompt, tokenizer, processor)
    assert isinstance(recipe, SupervisedRecipe)
    pairs = isinstance(recipe.loss, (PreferenceLoss, RankingLoss))
    return partial(_sequences, recipe.training.max_length, tokenizer, pairs)


def _sequences(max_length: int, tokenizer: Any, pairs: bool, row: Row) -> Sequences | None:
    sequences = sequences_of(tokenizer, row, pairs=pairs)
    cut = [(ids[:max_length], answer[:max_length]) for ids, answer in sequences]
    if not all(any(answer[1:]) for _, answer in cut):
        return None
    if cut != sequences:
        logger.warning_once("some rows are longer than max_length: they are truncated")
    return cut


def _question(max_prompt: int, tokenizer: Any, processor: Any, row: Row) -> Question | None:
    if "prompt" not in row:
        raise refused("a row", f"has {', '.join(row)}: expected prompt")
    inputs: dict[str, torch.Tensor] = {}
    if processor is None:
        ids = prompt_ids(tokenizer, row["prompt"])
    else:
        ids, inputs = image_prompt(processor, row["prompt"], row["images"])
    return Question(row, tuple(ids), inputs) if len(ids) <= max_prompt else None


def _supervised_steps(
    recipe: Recipe, sequences: Iterator[Sequences], tokenizer: Any, folder: Path, common: dict[str, Any]
) -> Iterator[dict[str, float]]:
    assert isinstance(recipe, SupervisedRecipe)
    training, model = recipe.training, common["model"]
    is_ranking = isinstance(recipe.loss, RankingLoss)
    pad = padding_token(tokenizer, model) if is_ranking else _tokenizer_padding(tokenizer)
    loop = SupervisedLoop(pad=pad, micro_batch=training.micro_batch, **common)
    for _ in range(training.steps):
        yield loop.step(sequences, training.batch)


def _tokenizer_padding(tokenizer: Any) -> int:
    return next((token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id) if token is not None), 0)


def padding_token(tokenizer: Any, model: Any) -> int:
    """Return the token to pad a classifier's sequences with: that of its configuration.

    transformers' classifiers score the last token that is not this one. A configuration without it gets the
    tokenizer's.
    """
    config = model.config.get_text_config()
    if config.pad_token_id is None or config.pad_token_id < 0:
        config.pad_token_id = _tokenizer_padding(tokenizer)
    return config.pad_token_id


def _policy_steps(
    recipe: Recipe, questions: Iterator[Question], tokenizer: Any, folder: Path, common: dict[str, Any]
) -> Iterator[dict[str, float]]:
    assert isinstance(recipe, PolicyRecipe)
    training, settings = recipe.training, recipe.engine
    with start_engine(
        settings.name,
        folder,
        dtype=None if settings.dtype is None else getattr(torch, settings.dtype),
        max_length=training.max_prompt + training.new_tokens,
        seed=recipe.seed,
        **settings.options,
    ) as engine:
        watch = None
        if recipe.watch is not None:
            watch = Watch(
                common["model"],
                engine,
                sampling=recipe.sampling,
                compute=common["compute"],
                optimizer=common["optimizer"],
                **asdict(recipe.watch),
            )
        loop = PolicyLoop(
            engine=engine,
            watch=watch,
            tokenizer=tokenizer,
            reward=partial(recipe.reward.function, **recipe.reward.arguments),
            group=training.group,
            new_tokens=training.new_tokens,
            sampling=recipe.sampling,
            updates=training.updates,
            row_tokens=training.row_tokens,
            on_non_finite=training.on_non_finite,
            **common,
        )
        for step in range(training.steps):
            # Widely spaced seeds, because dynamic sampling uses consecutive ones.
            yield loop.step(questions, training.questions, seed=1_000_000 * recipe.seed + 1_000 * step)
