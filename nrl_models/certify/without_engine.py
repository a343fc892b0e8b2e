"""Checks that need no engine: files, weights, layers, logits, gradients, batches, sharding, embeddings, tokenizer."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import torch
from transformers import PreTrainedModel

from nrl_models.auto import auto_class_for
from nrl_models.certify.certified import CheckpointUnderTest
from nrl_models.certify.check_result import CheckResult, Side, Status, status_of
from nrl_models.common.checkpoint.json_reading import read_object
from nrl_models.common.checkpoint.local_path import CONFIG_NAME, GENERATION_NAME
from nrl_models.common.config.validate import examine
from nrl_models.common.documents.packing import token_positions
from nrl_models.common.forward.evaluation import evaluating
from nrl_models.common.modules import is_base_model
from nrl_models.diagnostics.embeddings import diagnose_embeddings
from nrl_models.diagnostics.end_tokens import compare_end_tokens, has_key
from nrl_models.diagnostics.implausible import (
    doubtful_values,
    doubtful_weights,
    impossible_values,
    unlisted_tensors,
    unused_values,
)
from nrl_models.diagnostics.tokenizer_problems import empty_templates, encoding_problems, missing_generation_prompt
from nrl_models.engines.transfer.sent_tensors import is_finite
from nrl_models.errors import ConsistencyError, ShardingError, listed, one_line
from nrl_models.family import FamilyModel
from nrl_models.inputs.images import parameters_of
from nrl_models.inputs.model_inputs import inputs_for, takes_images
from nrl_models.inputs.tokenizers import as_ids, load_tokenizer
from nrl_models.logprobs import rollout_logprobs
from nrl_models.onboarding.estimate import estimate
from nrl_models.onboarding.estimate_step import Setting
from nrl_models.parity import check_parity, compare_state_dicts
from nrl_models.parity.noise import limit, logits_noise, logits_of
from nrl_models.parity.parity_report import FIRST_DIVERGENCE, Level, ParityRow, Unit
from nrl_models.parity.worst import last_if_nan, worst_of

SEQUENCES = ((17, 0), (31, 1), (9, 2))
"""Lengths and seeds of the sequences that are padded and packed."""

MEDIA = ("image", "boi", "eoi", "audio", "boa", "eoa", "video")
"""Kinds of special tokens of images, audio and video: `image_token_id` and so on."""

MESHES = ({"fsdp": 2}, {"tp": 2}, {"ep": 2}, {"pp": 2})
"""Meshes that sharding is tried on."""

LEVELS = {Level.WEIGHTS: "weights", Level.COMPONENTS: "layers", Level.LOGITS: "logits", Level.GRADIENTS: "gradients"}
"""Names of the checks of parity."""


def files(subject: CheckpointUnderTest) -> Iterator[CheckResult]:
    """Load the checkpoint strictly: every tensor must match, every configuration key must be supported."""
    inspection = subject.inspection
    count = sum(1 for _ in subject.model.parameters())
    if broken := [name for name, tensor in subject.model.state_dict().items() if not is_finite(tensor)]:
        problem = f"{len(broken)} tensors have NaN or infinite values: {listed(broken)}"
        advice = "Restore the weights from an intact copy."
        yield CheckResult("files", Status.FAILED, problem, compared=count, side=Side.FILES, advice=advice)
        return
    summary = f"{count} parameters loaded, {inspection.parameters:,} elements"
    if inspection.mtp_tensors:
        summary += f"; {inspection.mtp_tensors} tensors of multi-token prediction are kept apart"
    if unread := examine(type(subject.model), subject.config).unread:
        summary += f"; configuration keys that nothing reads: {listed(unread)}"
    yield CheckResult.of("files", [], summary, compared=count)


def values(subject: CheckpointUnderTest) -> Iterator[CheckResult]:
    """Find values of the configurations, and weights, that load without an error and are probably a mistake."""
    name, config = "values", subject.config.get_text_config()
    wrong = impossible_values(config, subject.generation, subject.embedding_rows)
    doubtful = [*doubtful_values(config, subject.inspection.dtypes), *doubtful_weights(subject.model)]
    doubtful += unlisted_tensors(subject.folder)
    count = sum(1 for _ in subject.model.parameters())
    if doubtful and not wrong:
        advice = "Compare with the published checkpoint. With --skip values, the answer is 'not decided'."
        yield CheckResult(name, Status.NOT_DECIDED, "; ".join(doubtful), compared=count, advice=advice)
        return
    passed = "; ".join(["no implausible value, no zero or repeated weight", *unused_values(config)])
    yield CheckResult.of(name, wrong, passed, compared=count, side=Side.CONFIG)


def saved_files(subject: CheckpointUnderTest) -> Iterator[CheckResult]:
    """Save the model, load it again, and compare every tensor."""
    with tempfile.TemporaryDirectory(dir=subject.out) as folder:
        subject.model.save_pretrained(folder)
        again = auto_class_for(folder).from_pretrained(folder, dtype=torch.float32, device=subject.options.device)
    difference = compare_state_dicts(subject.model.state_dict(), again.state_dict(), verbose=False)
    count = len(subject.model.state_dict())
    wrong = len(difference.missing) + len(difference.extra) + len(difference.max_diffs)
    yield CheckResult.of(
        "saved files",
        [] if difference.equal else [str(difference)],
        f"{count} tensors are equal after saving and loading",
        value=float(wrong),
        bound=0.0,
        unit=Unit.COUNT,
        compared=count,
        side=Side.MODEL,
    )


def parity(subject: CheckpointUnderTest) -> Iterator[CheckResult]:
    """Compare weights, layers, logits and gradients with transformers."""
    subject.release_model()
    report = check_parity(subject.folder, device=subject.options.device, seed=subject.options.seed)
    divergences = [row.measured for row in report.failed if row.check == FIRST_DIVERGENCE]
    for level, name in LEVELS.items():
        rows = [row for row in report.rows if row.level is level]
        yield _level(name, rows, divergences)


def _level(name: str, rows: list[ParityRow], divergences: list[str]) -> CheckResult:
    failed = [row for row in rows if not row.passed]
    shares = {row: share for row in rows if (share := row.share_of_bound) is not None}
    closest = max(shares, key=lambda row: last_if_nan(shares[row]), default=rows[0] if rows else None)
    worst = failed[0] if failed else closest
    if worst is None:
        return CheckResult(name, Status.NOT_DECIDED, "nothing was compared", compared=0)
    summary = f"{len(rows) - len(failed)} of {len(rows)} comparisons passed; "
    summary += "failed: " if failed else "closest to its bound: "
    summary += f"{worst.check}: {worst.measured} (expected: {worst.expected})"
    return CheckResult.of(
        name,
        [summary] if failed else [],
        summary,
        value=worst.value,
        bound=worst.bound,
        unit=worst.unit,
        compared=len(rows),
        side=Side.MODEL,
        advice=f"First divergence: {divergences[0]}. Run `nrl-models parity`." if divergences else "",
    )


def batches(subject: CheckpointUnderTest) -> Iterator[CheckResult]:
    """Compare sequences run separately with the same sequences in a padded batch and in a packed row."""
    model = subject.model
    if is_base_model(model):
        for name in ("padding", "packing"):
            yield CheckResult(name, Status.NOT_APPLICABLE, "a base model gives no log-probabilities")
        return
    bound = 2 * limit(
        logits_noise(model, inputs_for(model, length=32, batch=2, seed=subject.options.seed)), torch.float32
    )
    vocabulary = model.config.get_text_config().vocab_size
    sequences = [
        torch.randint(0, vocabulary, (length,), generator=torch.Generator().manual_seed(seed))
        for length, seed in SEQUENCES
    ]
    with evaluating(model):
        alone = [_own_logprobs(model, sequence[None])[0] for sequence in sequences]
        yield _difference("padding", alone, _left_padded(model, sequences), bound)
        try:
            packed = rollout_logprobs(model, sequences).logprobs.detach().cpu()
        except ValueError as error:  # documents cannot be kept apart, and the error says why
            yield CheckResult("packing", Status.NOT_APPLICABLE, one_line(error))
            return
        rows = [row[1 : len(sequence)] for row, sequence in zip(packed, sequences, strict=True)]
        if _takes_positions(model):
            mask = torch.ones(1, sum(map(len, sequences)), dtype=torch.long)  # must not hide where documents begin
            rows += [*_packed(model, sequences), *_packed(model, sequences, attention_mask=mask)]
            alone = [*alone, *alone, *alone]
        yield _difference("packing", alone, rows, bound)


def _takes_positions(model: PreTrainedModel) -> bool:
    """Return True for families, which find documents by their positions, and for other models with the argument."""
    return isinstance(model, FamilyModel) or "position_ids" in parameters_of(model.forward)


def _own_logprobs(model: PreTrainedModel, input_ids: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
    """Return log-probabilities `(batch, seq_len - 1)` from the logits of the model's forward, as trainers do."""
    if not _takes_positions(model):
        inputs.pop("position_ids", None)

    logits = logits_of(model, {"input_ids": input_ids, **inputs})
    return logits[:, :-1].log_softmax(-1).gather(-1, input_ids[:, 1:, None])[..., 0]


def _left_padded(model: PreTrainedModel, sequences: list[torch.Tensor]) -> list[torch.Tensor]:
    longest = max(map(len, sequences))
    input_ids = torch.zeros(len(sequences), longest, dtype=torch.long)
    mask = torch.zeros_like(input_ids)
    for row, sequence in enumerate(sequences):
        input_ids[row, longest - len(sequence) :] = sequence
        mask[row, longest - len(sequence) :] = 1
    logprobs = _own_logprobs(model, input_ids, attention_mask=mask, position_ids=token_positions(mask))
    return [row[longest - len(sequence) :] for row, sequence in zip(logprobs, sequences, strict=True)]


def _packed(model: PreTrainedModel, sequences: list[torch.Tensor], **inputs: torch.Tensor) -> list[torch.Tensor]:
    """Pack sequences into one row with restarting positions. Returns log-probabilities of each."""
    positions = torch.cat([torch.arange(len(sequence)) for sequence in sequences])
    logprobs = _own_logprobs(model, torch.cat(sequences)[None], position_ids=positions[None], **inputs)[0]
    ends = torch.tensor([len(sequence) for sequence in sequences]).cumsum(0).tolist()
    return [logprobs[end - len(sequence) : end - 1] for end, sequence in zip(ends, sequences, strict=True)]


def _difference(name: str, expected: list[torch.Tensor], actual: list[torch.Tensor], bound: float) -> CheckResult:
    """Compare log-probabilities of sequences, without their first tokens, which have none."""
    pairs = list(zip(expected, actual, strict=True))
    compared = sum(len(first) for first, _ in pairs)
    largest = worst_of(((first - second).abs().max().item() for first, second in pairs if len(first)), default=0.0)
    summary = f"log-probabilities differ by {largest:.1e} nats at most, expected at most {bound:.1e}"
    return CheckResult.of(
        name,
        [] if largest <= bound else [summary],
        summary,
        value=largest,
        bound=bound,
        unit=Unit.MAX_DIFF,
        compared=compared,
        side=Side.MODEL,
        advice="Positions or masks of a padded or packed batch differ from those of a sequence alone.",
    )


def sharding(subject: CheckpointUnderTest) -> Iterator[CheckResult]:
    """Build and shard the model on meta over two ranks of each dimension."""
    subject.release_model()
    allowed, refused = [], []
    for mesh in MESHES:
        (dimension,) = mesh
        try:
            estimate(subject.config, Setting(mesh, seq_len=128))
        except ShardingError as error:
            problem = error.problems[0] if error.problems else None
            refused.append(f"{dimension} ({problem.subject}: {problem.detail})" if problem else dimension)
        else:
            allowed.append(dimension)
    summary = f"two ranks of {', '.join(allowed) or 'no dimension'}"
    summary += f"; not supported: {'; '.join(refused)}" if refused else ""
    problems = [summary] if refused and not allowed else []
    yield CheckResult.of("sharding", problems, summary, compared=len(MESHES), side=Side.MODEL)


def embeddings(subject: CheckpointUnderTest) -> Iterator[CheckResult]:
    """Find embedding rows that were never trained. They are listed, and do not fail the check."""
    diagnosis = diagnose_embeddings(subject.folder, tokenizer=load_tokenizer(subject.folder))
    rows = sum(summary["shape"][0] for summary in diagnosis.measured["embeddings"])
    summary = "no untrained rows" if diagnosis.passed else "some rows look untrained: keep their tokens out of prompts"
    advice = "" if diagnosis.passed else "`nrl-models diagnose embeddings` lists them."
    yield CheckResult("embeddings", status_of(failed=False, compared=rows), summary, compared=rows, advice=advice)


def tokenizer(subject: CheckpointUnderTest) -> Iterator[CheckResult]:
    """Check that every token of the tokenizer, and every special token of the configuration, has an embedding row.

    Also encodes a text, and applies the chat template if there is one.
    """
    name = "tokenizer"
    try:
        loaded = load_tokenizer(subject.folder)
    except ConsistencyError as error:
        yield CheckResult(name, Status.FAILED, str(error), compared=0, side=Side.TOKENIZER)
        return
    if loaded is None:
        yield CheckResult(name, Status.NOT_APPLICABLE, "the checkpoint has no tokenizer")
        return
    rows, vocabulary = subject.embedding_rows, loaded.get_vocab()
    media = {getattr(loaded, f"{kind}_token_id", None) for kind in MEDIA}  # text models never use these
    outside = sorted(token for token in vocabulary.values() if token >= rows and token not in media)
    wrong = []
    if outside:
        wrong.append(f"{len(outside)} tokens have no embedding row, the first is {outside[0]}; there are {rows} rows")
    wrong += [
        f"tokenizer eos_token_id {token} has no embedding row" for token in as_ids(loaded.eos_token_id) if token >= rows
    ]
    if len({*vocabulary.values()}) < len(vocabulary):
        wrong.append(f"{len(vocabulary) - len({*vocabulary.values()})} tokens share an id with another token")
    wrong += encoding_problems(loaded, templates=not takes_images(subject.model))
    wrong += empty_templates(subject.folder)
    if not wrong and subject.model.can_generate():
        wrong += missing_generation_prompt(loaded)
    text_config = subject.config.get_text_config()
    keys = ("bos_token_id", "eos_token_id", "pad_token_id")
    named = {f"config.json {key}": as_ids(getattr(text_config, key, None), key) for key in keys}
    if (generation := subject.generation) is not None:
        named[f"{GENERATION_NAME} eos_token_id"] = as_ids(generation.eos_token_id)
    of_config = [
        f"{key} {token} has no embedding row" for key, tokens in named.items() for token in tokens if token >= rows
    ]
    advice = "Tokenizer, configuration and weights may be of different models."
    if not wrong and not of_config:
        is_default = subject.folder.is_dir() and not has_key(read_object(subject.folder / CONFIG_NAME), "eos_token_id")
        ends = compare_end_tokens(loaded, text_config, generation, is_default=is_default)
        of_config += ends.wrong
        advice = "Set the same eos_token_id in config.json, generation_config.json and the tokenizer."
        if ends.doubtful:
            summary, advice = "; ".join(ends.doubtful), f"Completions may end at other tokens than intended. {advice}"
            yield CheckResult(name, Status.NOT_DECIDED, summary, compared=len(vocabulary), advice=advice)
            return
    yield CheckResult.of(
        name,
        [*wrong, *of_config],
        f"{len(vocabulary)} tokens, {rows} embedding rows{'' if loaded.chat_template else ', no chat template'}",
        compared=len(vocabulary),
        side=Side.TOKENIZER if wrong else Side.CONFIG,
        advice=advice,
    )
