"""Log-probabilities of a batch of sequences of different lengths, and the gradient of a loss of them, in one call.

The sequences run in microbatches (`nrl_models.logprobs.microbatches`). The backward of a microbatch follows its forward
(`nrl_models.logprobs.accumulation`), so only one microbatch's activations are in memory.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from nrl_models.common.config.positions import model_limit
from nrl_models.common.documents.rope_lengths import rope_switch
from nrl_models.common.dtypes import unreadable
from nrl_models.common.forward.processor_outputs import contradictions, without_tokens
from nrl_models.common.modules import device_of, innermost
from nrl_models.errors import UnknownArgumentError, parse_option, shown
from nrl_models.logprobs import microbatches
from nrl_models.logprobs.accumulation import Accumulation, MicrobatchInputs, SequenceBatch
from nrl_models.logprobs.chunked import chunk_tokens
from nrl_models.logprobs.head import require_head
from nrl_models.logprobs.microbatches import Microbatch, RowLayout, largest, layout_of, ranks_of
from nrl_models.logprobs.sampling import Sampling
from nrl_models.logprobs.shared_prompts import can_share_prompts, units_with_shared_prompts
from nrl_models.logprobs.token_inputs import require_zeros_and_ones, unknown_token
from nrl_models.logprobs.tokens import LossFunction, LossTerms, TokenLogprobs

TokenSequence = Sequence[int] | torch.Tensor
Mask = Sequence[bool] | torch.Tensor


def rollout_logprobs(
    model: nn.Module,
    sequences: Sequence[TokenSequence],
    *,
    score: Sequence[Mask] | None = None,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    entropy: bool = False,
    reference: nn.Module | None = None,
    loss: LossFunction | None = None,
    loss_terms: LossTerms | str | torch.Tensor = LossTerms.TOKEN,
    row_tokens: int | None = None,
    chunk_size: int | str | None = "auto",
    group: Any = None,
    model_inputs: Sequence[Mapping[str, Any]] | None = None,
    share_prompts: bool = True,
) -> TokenLogprobs:
    """Compute the log-probability of each token of a list of sequences, and optionally the gradient of a loss.

    The result equals one batch padded on the right. The sequences run in microbatches, so activations need the memory
    of one microbatch. If the model keeps packed documents apart, a microbatch is one row without padding; otherwise
    (also with PEFT's prompt learning and activated LoRA) sequences of similar lengths are padded. `record_routing` and
    `replay_routing` have the choices of the batch padded on the right.

    Args:
        model: As for `token_logprobs`.
        sequences: Token IDs of each sequence, prompt and completion, without padding: lists, or tensors `(length,)`.
        score: For each sequence, a bool per token: the tokens to score, for example completions. Default: all.
        temperature, top_k, top_p: The engine's sampling parameters, see `Sampling`.
        entropy, reference, chunk_size: As for `token_logprobs`.
        loss: A function of the returned object for the complete batch, `(sequences, longest)` each. Divisors are
            numbers of tokens or sequences of the batch (`token_weights`). It is called for each microbatch, with zeros
            for log-probabilities that are not known yet, and at the end. It must be a pure function of its argument
            and of constant tensors. Its gradient is added to the parameters' `grad`.
        loss_terms: Tokens that a term of the loss reads together: at most those of a sequence, see `LossTerms`; or
            numbers `(sequences,)` that are equal for sequences read together (both answers of a pair, for DPO), which
            then run in one microbatch if they fit. Changes only the time: if a loss reads more together, its gradient
            is correct and some sequences run twice.
        row_tokens: Largest number of tokens of a microbatch, padding included. Default: 1024 on a CPU and 8192
            elsewhere, or as many as the longest sequence, or the tokens that are read together, need.
        group: Process group whose ranks make this call together, each with its own sequences (as FSDP's collectives
            require). They run as many microbatches as the rank that needs most; surplus ones change nothing. Default:
            all ranks if torch.distributed is initialized.
        model_inputs: For each sequence, further arguments of the model's forward (`pixel_values`, ...), empty if there
            are none. A tensor with a value per token includes the completion's tokens. They are moved to the model's
            device and dtype when they are needed. Such sequences run one by one, in one process. The `input_ids` and
            `attention_mask` of a processor are left out, after a check that they have the same tokens, without padding.
        share_prompts: Compute the tokens with which several sequences begin once, if that gives the same result:
            the model keeps packed documents apart, and there is no dropout or record of experts. Rows of such
            sequences have up to 2048 tokens on a CPU if `row_tokens` is not passed.

    Returns:
        Statistics of each token, `(sequences, longest)` each, on the model's device, in the order of the sequences,
        padded on the right with zeros and False. Nothing has a graph. `loss` is a scalar for this rank's sequences.

    Raises:
        ValueError: Sequences that are empty, have invalid token IDs, or are longer than the model's limit or
            `row_tokens`; masks of other lengths. All are listed by number, before anything runs, on all ranks if on
            any.
        HeadError, UnknownArgumentError, UnknownOptionError: As for `token_logprobs`.

    Examples:
        >>> from nrl_models import AutoModelForCausalLM, rollout_logprobs
        >>> model = AutoModelForCausalLM.from_pretrained("demo/checkpoint")
        >>> result = rollout_logprobs(model, [[1, 2, 3, 4], [1, 5]])
        >>> result.logprobs.shape  # the first token of a sequence has none
        torch.Size([2, 4])
    """
    Sampling(temperature, top_k, top_p)
    chunk_tokens(chunk_size)
    if not isinstance(share_prompts, bool):
        raise UnknownArgumentError(f"share_prompts={shown(share_prompts)}: expected True or False")
    if loss is not None and not callable(loss):
        raise UnknownArgumentError(f"loss={shown(loss)}: expected a function of the log-probabilities")
    if not isinstance(loss_terms, torch.Tensor):
        loss_terms = parse_option(LossTerms, loss_terms, "loss_terms", "or a number of each sequence")
    wrapped = [model] if reference is None else [model, reference]
    sequence_inputs = [] if model_inputs is None else list(model_inputs)
    sequence_inputs = sequence_inputs if any(sequence_inputs) else []
    require_head(wrapped, chunk_size, {name for each in sequence_inputs if isinstance(each, Mapping) for name in each})
    models = [innermost(part) for part in wrapped]
    device = device_of(model)
    if isinstance(sequences, Iterable) and not isinstance(sequences, torch.Tensor):
        sequences = list(sequences)
    ids, problems = _ids(sequences, models, row_tokens)
    problems += _wrong_inputs(sequence_inputs, ids, group)
    scores, wrong = _scores(score, ids)
    _agree([*problems, *wrong, *_wrong_terms(loss_terms, len(ids))], len(ids), group, device)
    layout = RowLayout.ALONE if sequence_inputs else layout_of(*wrapped)
    shares = share_prompts and layout is RowLayout.PACKED and can_share_prompts(*models)
    planned, count = _plan(ids, scores if shares else None, layout, loss_terms, row_tokens, device, models, group)
    options: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "entropy": entropy}
    options |= {"reference": reference, "chunk_size": chunk_size}
    batch = SequenceBatch(ids, scores, device, [without_tokens(inputs) for inputs in sequence_inputs])
    parts = [MicrobatchInputs.of(batch, part, layout) for part in planned]
    return Accumulation(model, batch, parts, count, options, loss, loss_terms, group).run()


# Validation of arguments


def _ids(
    sequences: Sequence[TokenSequence], models: Sequence[nn.Module], row_tokens: int | None
) -> tuple[list[torch.Tensor], list[str]]:
    """Convert each sequence to token ids, `(length,)` int64 on the CPU, and list the problems."""
    problems = []
    if isinstance(sequences, torch.Tensor):
        problems.append("a tensor is not a list of sequences: use `token_logprobs` for padded and packed batches")
    elif not isinstance(sequences, Iterable):
        problems.append(f"{shown(sequences)} is not a list of sequences")
    if row_tokens is not None and (type(row_tokens) is not int or row_tokens < 1):
        problems.append(f"row_tokens={shown(row_tokens)}: expected a whole number of at least 1")
        row_tokens = None
    limits = {model_limit(config): "the model takes" for part in models if (config := _config(part)) is not None}
    limits |= {row_tokens: "row_tokens allows"}
    ids, errors = _tensors(sequences if not problems else ())
    for number, row in enumerate(ids):
        if number in errors:
            problems.append(f"sequence {number} is not a list of token ids: {errors[number]}")
            continue
        if not row.numel():
            problems.append(f"sequence {number} is empty")
        elif row.ndim != 1 or row.is_floating_point() or row.is_complex() or row.dtype == torch.bool:
            problems.append(f"sequence {number} is {tuple(row.shape)} of {row.dtype}: expected token ids, (length,)")
        elif (unknown := unknown_token(models, row)) is not None:
            problems.append(f"sequence {number} has {unknown}: pass sequences without padding")
        for limit, limit_source in limits.items():
            if limit is not None and row.ndim == 1 and len(row) > limit:
                problems.append(f"sequence {number} has {len(row):,} tokens, and {limit_source} {limit:,}")
    return [row.long() for row in ids], problems


def _tensors(rows: Sequence[Any]) -> tuple[list[torch.Tensor], dict[int, Exception]]:
    """Convert rows to tensors on the CPU, with one wait for a GPU. Also returns the errors of other rows.

    A tensor of one zero replaces such a row.
    """
    tensors: list[torch.Tensor] = []
    errors: dict[int, Exception] = {}
    for number, row in enumerate(rows):
        try:
            tensor = torch.as_tensor(row)
            if problem := unreadable(tensor):
                raise ValueError(f"the tensor {problem}")
            tensors.append(tensor)
        except (TypeError, ValueError, RuntimeError) as error:
            tensors.append(torch.zeros(1, dtype=torch.long))
            errors[number] = error
    copies = [row.to("cpu", non_blocking=True) for row in tensors]
    for device in {row.device for row in tensors if row.device.type != "cpu"}:
        torch.accelerator.synchronize(device)
    return copies, errors


def _config(model: nn.Module) -> PreTrainedConfig | None:
    config: Any = getattr(model, "config", None)
    return config if isinstance(config, PreTrainedConfig) else None


def _scores(score: Sequence[Mask] | None, ids: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[str]]:
    """Convert each mask of scored tokens to `(length,)` bool on the CPU, and list the problems."""
    if score is None or not ids:
        return [torch.ones_like(row, dtype=torch.bool) for row in ids], []
    if not isinstance(score, Sequence | torch.Tensor):
        return [], [f"score={shown(score)}: expected a list of masks"]
    if len(score) != len(ids):
        return [], [f"score has {len(score)} masks for {len(ids)} sequences"]
    masks, errors = _tensors(score)
    wrong = []
    for number, (mask, row) in enumerate(zip(masks, ids, strict=True)):
        if number in errors:
            wrong.append(f"score of sequence {number} is not a list of bools: {errors[number]}")
            continue
        try:
            require_zeros_and_ones(score=mask)
        except ValueError as error:
            wrong.append(f"score of sequence {number} is not a list of bools: {error}")
        if mask.shape != row.shape:
            wrong.append(
                f"score of sequence {number} is {tuple(mask.shape)}: expected {tuple(row.shape)}, as its token ids"
            )
    return [mask.bool() for mask in masks], wrong


def _wrong_terms(terms: LossTerms | str | torch.Tensor, count: int) -> list[str]:
    if not isinstance(terms, torch.Tensor) or terms.shape == (count,):
        return []
    return [f"loss_terms is {tuple(terms.shape)}: expected ({count},)"]


def _wrong_inputs(sequence_inputs: Sequence[Any], ids: Sequence[torch.Tensor], group: Any) -> list[str]:
    wrong = (
        [f"there are model_inputs for {len(sequence_inputs)} of {len(ids)} sequences"]
        if sequence_inputs and len(sequence_inputs) != len(ids)
        else []
    )
    pairs = enumerate(zip(ids, sequence_inputs, strict=False))
    conflicts = {number: contradictions(row, inputs) for number, (row, inputs) in pairs}
    wrong += [
        f"model_inputs of sequence {number} {each}" for number, problems in conflicts.items() for each in problems
    ]
    if sequence_inputs and ranks_of(group) > 1:  # all ranks must run the same forwards, including towers
        wrong.append(f"model_inputs: expected one process, not {ranks_of(group)} ranks")
    return wrong


SHOWN = 20
"""Problems that an error lists."""


def _agree(problems: list[str], count: int, group: Any, device: torch.device) -> None:
    """Raise on every rank if any rank has problems, so that no rank waits for another."""
    if not problems and not count and ranks_of(group) == 1:
        problems = ["there are no sequences"]
    (elsewhere,) = largest([len(problems)], group, device)
    if problems:
        more = [f"and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
        raise ValueError("; ".join([*problems[:SHOWN], *more]))
    if elsewhere:
        raise ValueError(f"another rank has sequences with {elsewhere} problems: see its error")


def _plan(
    ids: Sequence[torch.Tensor],
    scores: Sequence[torch.Tensor] | None,
    layout: RowLayout,
    terms: LossTerms | str | torch.Tensor,
    row_tokens: int | None,
    device: torch.device,
    models: Sequence[nn.Module],
    group: Any,
) -> tuple[list[Microbatch], int]:
    """Return this rank's microbatches, and the number that the rank with most runs.

    With LongRoPE, the longest sequence of a forward decides the factors. So shorter sequences run without longer ones.
    """
    configs = [config for part in models if (config := _config(part)) is not None]
    switches = sorted({switch for config in configs if (switch := rope_switch(config)) is not None})
    kinds: dict[int, list[int]] = {}
    for number, row in enumerate(ids):
        kinds.setdefault(bisect_left(switches, len(row)), []).append(number)
    plans = []
    for numbers in kinds.values():
        ids_and_scores = [ids[number] for number in numbers], scores and [scores[number] for number in numbers]
        own_terms = terms[numbers] if isinstance(terms, torch.Tensor) else terms
        units, limit = _units(*ids_and_scores, layout, own_terms, row_tokens, device)
        renamed = [replace(unit, numbers=tuple(numbers[index] for index in unit.numbers)) for unit in units]
        plans.append((renamed, limit, len(microbatches.fewest(renamed, layout, limit))))
    (count,) = largest([sum(fewest for *_, fewest in plans)], group, device)
    planned = [
        part
        for units, limit, fewest in plans
        for part in microbatches.levelled(units, layout, limit, count if len(plans) == 1 else fewest)
    ]
    return planned, count


def _units(
    ids: Sequence[torch.Tensor],
    scores: Sequence[torch.Tensor] | None,
    layout: RowLayout,
    terms: LossTerms | str | torch.Tensor,
    row_tokens: int | None,
    device: torch.device,
) -> tuple[list[Microbatch], int]:
    """Return units of sequences to run together, split if they exceed the budget, and the budget.

    Sequences share prompts if their `scores` are passed.
    """
    on_cpu, lengths = device.type == "cpu", [len(row) for row in ids]
    usual = microbatches.ROW_TOKENS_OF_CPU if on_cpu else microbatches.ROW_TOKENS_OF_GPU
    alone = [Microbatch.of([number], lengths) for number in range(len(lengths))]
    if scores is not None:
        longest = max([microbatches.SHARED_ROW_TOKENS_OF_CPU if on_cpu else usual, *lengths])
        alone = units_with_shared_prompts(ids, scores, longest if row_tokens is None else row_tokens)
    units = alone
    if isinstance(terms, torch.Tensor) and layout is not RowLayout.ALONE:
        units = _together(alone, terms.tolist())
    sizes = [microbatches.size(layout, unit) for unit in units]
    limit = max([usual, *sizes]) if row_tokens is None else row_tokens
    fits = [unit for unit, tokens in zip(units, sizes, strict=True) if tokens <= limit]
    fitting = {number for unit in fits for number in unit.numbers}
    return fits + [unit for unit in alone if fitting.isdisjoint(unit.numbers)], limit


def _together(units: Sequence[Microbatch], terms: Sequence[Any]) -> list[Microbatch]:
    """Join units that have a sequence with the same term."""
    joined: dict[int, tuple[Microbatch, set[Any]]] = {}
    index_of: dict[Any, int] = {}
    for index, unit in enumerate(units):
        unit_terms = {terms[number] for number in unit.numbers}
        for other in sorted({index_of[term] for term in unit_terms if term in index_of}):
            others, other_terms = joined.pop(other)
            unit, unit_terms = others + unit, unit_terms | other_terms
        joined[index] = unit, unit_terms
        index_of.update(dict.fromkeys(unit_terms, index))
    return [unit for unit, _ in joined.values()]
