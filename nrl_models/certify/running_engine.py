"""Checks of one running engine: start, prefix caching, longest length, routed experts, images."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from nrl_models.certify.certified import CheckpointUnderTest
from nrl_models.certify.check_result import CheckResult, Side, Status, token_error
from nrl_models.certify.sides import side_of_verdict
from nrl_models.certify.with_engine import of_cells
from nrl_models.common.dtypes import dtype_name
from nrl_models.common.forward.routing import can_replay, engine_routing, replay_routing
from nrl_models.common.modules import is_base_model
from nrl_models.consistency import Data, Mode
from nrl_models.consistency.cells import THRESHOLD, Cell, Settings, is_conclusive
from nrl_models.consistency.consistency_report import CellResult
from nrl_models.consistency.judge import Judge
from nrl_models.consistency.measure import Meter
from nrl_models.consistency.references import References
from nrl_models.consistency.vision.image_check import compare_images
from nrl_models.diagnostics.engine_checks import diagnose_max_model_len, diagnose_prefix_caching
from nrl_models.diagnostics.lengths import counting_prompt, fitting_lengths
from nrl_models.engines.engine_types import Sample
from nrl_models.engines.scores import final_scores, padded
from nrl_models.errors import EngineError, EngineOptionError, EngineUnavailableError, listed, one_line
from nrl_models.inputs.images import takes_images
from nrl_models.inputs.model_inputs import inputs_for
from nrl_models.inputs.processors import load_processor
from nrl_models.logprobs.metrics import shown_error, token_mult_prob_error
from nrl_models.logprobs.sampling import Sampling
from nrl_models.onboarding.inspect import ModelKind, kinds_of
from nrl_models.parity.worst import worst_of

NEW_TOKENS = 16
"""Number of sampled tokens per sequence."""

COUNT, GUIDE_COUNT = (100, 64), (3_000, 2_048)
"""Prefix caching: last number of the counting prompt, and number of sampled tokens; the guide's with `full`."""

PIXELS = ((96, 64), (64, 64))
"""Sizes of the images in the prompts."""


def engine_start(subject: CheckpointUnderTest) -> Iterator[CheckResult]:
    """Start the engine, and check that it runs as requested: dtype, vocabulary and length limit."""
    name = "engine start"
    try:
        known = subject.engine.capabilities()
    except EngineOptionError:
        raise
    except EngineUnavailableError as error:
        yield CheckResult(name, Status.NOT_DECIDED, one_line(error), compared=0, is_error=True)
        return
    except EngineError as error:
        advice = "Change the engine's options, or use another engine or version."
        yield CheckResult(
            name, Status.FAILED, one_line(error), compared=0, side=Side.ENGINE, advice=advice, is_error=True
        )
        return
    model = subject.trainer.model
    rows = subject.trainer.capabilities().vocabulary
    facts = {
        "dtype": (known.dtype and dtype_name(known.dtype), dtype_name(model.dtype), known.dtype == model.dtype),
        "vocabulary": (known.vocabulary, rows, not (known.vocabulary and rows) or known.vocabulary >= rows),
        "maximum length": (
            known.max_length,
            subject.longest,
            known.max_length is None or known.max_length >= subject.longest,
        ),
    }
    compared = {fact: values for fact, values in facts.items() if values[0] is not None}
    problems = [
        f"{fact} {actual}, expected {wanted}" for fact, (actual, wanted, agrees) in compared.items() if not agrees
    ]
    shown = ", ".join(f"{fact} {actual}" for fact, (actual, _, _) in compared.items())
    yield CheckResult.of(
        name,
        problems,
        shown or "the engine reports nothing about itself",
        compared=len(compared),
        side=Side.ENGINE,
        advice="Start the engine with the dtype and length of the rollouts (--dtype, --engine-option).",
    )


def prefix_caching(subject: CheckpointUnderTest) -> Iterator[CheckResult]:
    """Continue the engine's own completion from its prefix cache, and compare with a prefill of all tokens."""
    name, engine = "prefix caching", subject.engine
    if not engine.capabilities().prefix_caching:
        yield CheckResult(name, Status.NOT_APPLICABLE, f"{engine.name} runs without it")
        return
    count, new = GUIDE_COUNT if subject.options.full else COUNT
    prompts = subject.prompts
    usual = len(prompts.counting(count)), new
    length, new = fitting_lengths(subject.longest, None, None, usual=usual, turns=2)
    prompt, _ = counting_prompt(prompts.counting, count, length)
    diagnosis = diagnose_prefix_caching(engine, subject.name, prompt, new_tokens=new, threshold=THRESHOLD)
    metrics = diagnosis.measured.get("against_prefill", {})
    error = metrics.get("token_mult_prob_error")
    summary = diagnosis.lines[-1]
    if error is not None:
        summary = f"token_mult_prob_error {shown_error(error)} between cached tokens and a prefill of all tokens"
    yield CheckResult.of(
        name,
        [] if diagnosis.passed else [summary],
        summary,
        **token_error(error, THRESHOLD),
        compared=metrics.get("tokens", 0),
        side=Side.ENGINE,
        advice="Run rollouts with enable_prefix_caching=False.",
    )


def longest_length(subject: CheckpointUnderTest) -> Iterator[CheckResult]:
    """Compare one sequence of the longest length, and check that the engine stops at its limit."""
    engine, trainer, length = subject.engine, subject.trainer, subject.longest
    cell = Cell(length, Data.DUMMY, Mode.SAMPLING, 1)
    settings = Settings(
        (length,),
        (cell.data,),
        (cell.mode,),
        (1,),
        new_tokens=NEW_TOKENS,
        threshold=subject.threshold,
        seed=subject.options.seed,
    )
    meter = Meter(engine, trainer, subject.prompts, settings)
    result = CellResult.of(cell, (meter.measure(cell),), settings)
    if not result.passed:
        references = References(subject.folder, device=subject.options.device)
        result = replace(result, verdict=Judge(meter, references).judge(cell, result.repeats[0]))
    problems = result.faults
    side = side_of_verdict(result.verdict) or Side.ENGINE
    known = engine.capabilities()
    if known.own_limit and known.max_length is not None:
        prompt = subject.prompts.make(cell, known.max_length - 4, settings.seed)[0]
        diagnosis = diagnose_max_model_len(engine, subject.name, prompt, prompt_tokens=len(prompt))
        problems += [] if diagnosis.passed else [diagnosis.lines[-1]]
    verdict = result.verdict.summary if result.verdict else ""
    yield of_cells(subject, "longest length", [result], problems, verdict, side)


def routed_experts(subject: CheckpointUnderTest) -> Iterator[CheckResult]:
    """Check that the engine reports the experts of every token and layer, and replay them in the trainer."""
    name, trainer = "routed experts", subject.trainer
    if ModelKind.MOE not in kinds_of(subject.config) or not can_replay(trainer.model):
        summary = "the model has no experts, or its routing cannot be replayed"
        yield CheckResult(name, Status.NOT_APPLICABLE, summary)
        return
    cell = Cell(2 * NEW_TOKENS, Data.DUMMY, Mode.SAMPLING, 2)
    prompts = subject.prompts.make(cell, NEW_TOKENS, subject.options.seed)
    prompts[0] = prompts[0][: NEW_TOKENS // 2]
    samples = subject.engine.generate(prompts, Sampling(), max_new_tokens=NEW_TOKENS, seed=subject.options.seed)
    routed = [sample.routed_experts for sample in samples if sample.routed_experts is not None]
    if not routed:
        advice = "For router replay, start it with --engine-option enable_return_routed_experts=true."
        summary = f"{subject.engine.name} does not report its experts"
        yield CheckResult(name, Status.NOT_COVERED, summary, advice=advice)
        return
    problems = _incomplete(samples)
    error = None
    if not problems:
        try:
            error = _replayed_error(subject, samples, routed)
        except ValueError as reason:
            problems = [str(reason)]
    if error is not None and not error <= THRESHOLD:
        problems = [f"token_mult_prob_error {shown_error(error)} with the engine's experts replayed in the trainer"]
    shown = "" if error is None else shown_error(error)
    yield CheckResult.of(
        name,
        problems,
        f"all tokens and layers reported; token_mult_prob_error {shown} replayed",
        **token_error(error, THRESHOLD),
        compared=sum(choices.shape[:2].numel() for choices in routed),
        side=Side.ENGINE,
        advice="Do not replay this engine's experts.",
    )


def _incomplete(samples: Sequence[Sample]) -> list[str]:
    """Return what is missing in the experts of samples: tokens, or different experts of a token."""
    problems = []
    for number, sample in enumerate(samples):
        choices, expected = sample.routed_experts, len(sample.sequence) - 1
        if choices is None or len(choices) != expected:
            problems.append(f"sequence {number}: experts of {0 if choices is None else len(choices)} tokens, expected "
                            f"{expected}")  # fmt: skip
        elif choices.numel() == 0 or bool((choices < 0).any()):
            problems.append(f"sequence {number}: tokens without experts")
        else:
            repeated = (choices.sort(-1).values.diff(dim=-1) == 0).any(-1)
            if bool((repeated.any(0) & ~repeated.all(0)).any()):  # layers without experts always have the same number
                problems.append(f"sequence {number}: tokens with an expert that was chosen twice")
    return problems


def _replayed_error(subject: CheckpointUnderTest, samples: Sequence[Sample], routed: Sequence[torch.Tensor]) -> float:
    """Return `token_mult_prob_error` of the trainer that replays the engine's experts, one sequence after the other."""
    trainer, rows = subject.trainer, []
    for sample, choices in zip(samples, routed, strict=True):
        record = engine_routing(trainer.model, [choices], len(sample.sequence))
        with replay_routing(trainer.model, record):
            rows.append(final_scores(trainer, torch.tensor([sample.sequence]), len(sample.tokens), Sampling())[0])
    decode = padded([sample.logprobs for sample in samples])
    return token_mult_prob_error(torch.stack(rows), decode)


def images(subject: CheckpointUnderTest) -> Iterator[CheckResult]:
    """Compare prompts with images, if the model supports images."""
    name, trainer = "images", subject.trainer
    if not takes_images(trainer.model) or is_base_model(trainer.model):
        yield CheckResult(name, Status.NOT_APPLICABLE, "the model takes no images")
        return
    known = subject.engine.capabilities()
    if not known.raw_images and not known.images:
        yield CheckResult(name, Status.NOT_COVERED, f"{subject.engine.name} accepts only token ids here")
        return
    errors, tokens, bound, faults = _raw_images(subject) if known.raw_images else _image_tensors(subject)
    worst = worst_of(errors, default=0.0)
    failed = not worst <= bound
    status = Status.FAILED if failed else Status.NOT_DECIDED if not (tokens and is_conclusive(worst)) else Status.PASSED
    yield CheckResult(
        name,
        status,
        f"{len(errors)} prompts; worst token_mult_prob_error {shown_error(worst)}"
        + (f"; first difference: {listed(faults)}" if faults else ""),
        **token_error(worst, min(bound, THRESHOLD)),
        compared=tokens,
        side=Side.ENGINE if failed else None,
        advice="Run `nrl-models consistency --images`." if status is not Status.PASSED else "",
    )


def _raw_images(subject: CheckpointUnderTest) -> tuple[list[float], int, float, list[str]]:
    """Compare images that engine and trainer process themselves. Returns errors, tokens, their bound, and faults."""
    from PIL import Image  # not a dependency of models without images

    from nrl_models.consistency.vision.image_files import file_prompt

    processor = load_processor(subject.folder)
    prompts = []
    with tempfile.TemporaryDirectory() as folder:
        for number, size in enumerate(PIXELS):
            file = Path(folder) / f"{number}.png"
            Image.linear_gradient("L").resize(size).convert("RGB").save(file)
            prompts.append(file_prompt(processor, file, "What is this?"))
    comparisons = compare_images(
        subject.engine,  # type: ignore[arg-type]  # raw images: vLLM
        subject.trainer,
        processor,
        prompts,
        Sampling(),
        threshold=THRESHOLD,
        new_tokens=NEW_TOKENS,
    )
    faults = [str(comparison.fault) for comparison in comparisons if comparison.fault]
    errors = [comparison.worst for comparison in comparisons]
    return errors, sum(comparison.new_tokens for comparison in comparisons), comparisons[0].bound, faults


def _image_tensors(subject: CheckpointUnderTest) -> tuple[list[float], int, float, list[str]]:
    """Compare random image tensors, for engines that take the processor's output. Returns as `_raw_images`."""
    engine, trainer = subject.engine, subject.trainer
    inputs = inputs_for(trainer.model, batch=1, images=True, seed=subject.options.seed)
    prompt = inputs.pop("input_ids")[0].tolist()
    (sample,) = engine.generate(
        [prompt], Sampling(), max_new_tokens=NEW_TOKENS, ignore_end=False, model_inputs=[inputs]
    )
    count = len(sample.tokens)
    if not count:
        return [], 0, THRESHOLD, []
    sample = replace(sample, model_inputs=inputs)  # not the inputs that the engine used
    scores = trainer.score([sample.sequence], Sampling(), last=count, model_inputs=[sample.sequence_inputs])
    logprobs = torch.tensor([scores[0][-count:], sample.logprobs], dtype=torch.float32)
    error = token_mult_prob_error(*logprobs)
    return [error], count, THRESHOLD, []
