"""Log-probabilities of a batch of sequences of various lengths, and the gradient of a loss of them, in one call.

The sequences run in microbatches (`nrl_models.logprobs.microbatches`), each backward right after its forward
(`nrl_models.logprobs.accumulation`), so that activations take the memory of one microbatch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from nrl_models.common.config.positions import model_limit
from nrl_models.common.modules import innermost
from nrl_models.errors import parse_option
from nrl_models.logprobs import microbatches
from nrl_models.logprobs.accumulation import Accumulation, Batch, Part
from nrl_models.logprobs.microbatches import Layout, Microbatch, largest, layout_of, ranks_of
from nrl_models.logprobs.sampling import Sampling
from nrl_models.logprobs.tokens import Loss, LossTerms, TokenLogprobs, chunk_tokens

Tokens = Sequence[int] | torch.Tensor
Mask = Sequence[bool] | torch.Tensor


def rollout_logprobs(
    model: nn.Module,
    sequences: Sequence[Tokens],
    *,
    score: Sequence[Mask] | None = None,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    entropy: bool = False,
    reference: nn.Module | None = None,
    loss: Loss | None = None,
    loss_terms: LossTerms | str | torch.Tensor = LossTerms.TOKEN,
    row_tokens: int | None = None,
    chunk_size: int | str | None = "auto",
    group: Any = None,
    model_inputs: Sequence[Mapping[str, Any]] | None = None,
) -> TokenLogprobs:
    """The log-probability of each token of some sequences; with a loss, its gradient is added to the parameters'.

    Everything is as if the sequences ran as one batch, padded on the right; but they run in microbatches, and the
    memory of activations is that of one microbatch. Where the model keeps packed documents apart, a microbatch is one
    row without padding; where it cannot, sequences of like lengths are padded.

    Args:
        model: as for `token_logprobs`.
        sequences: token ids of each, prompt and completion, without padding: lists, or tensors `(length,)`.
        score: for each sequence, which of its tokens to score, as many bools: completions, say. All by default.
        temperature, top_k, top_p: what the engine samples with, see `Sampling`.
        entropy, reference, chunk_size: as for `token_logprobs`.
        loss: a function of what this returns, of the whole batch: `(sequences, longest)` each, as below. Where it
            divides by numbers of tokens or of sequences, they are those of the batch (`token_weights`). It is called
            for each microbatch, with zeros for log-probabilities that are not known (those of others), and in the end:
            it has to be a function of its argument and of tensors that do not change, without effects of its own. Its
            gradient is computed microbatch by microbatch and added to the parameters' `grad`.
        loss_terms: which tokens a term of the loss reads together: those of a sequence at most, see `LossTerms`; or
            numbers `(sequences,)`, the same for sequences that are read together (both answers of a pair, for DPO),
            which then run in one microbatch if they fit. It concerns time alone: a loss that reads more together has
            the right gradient, and some sequences run twice.
        row_tokens: tokens of a microbatch at most, padding included: activations grow with it. By default 1024 on a CPU
            and 8192 on others, or as many as the longest sequence, or what is read together, has.
        group: the process group whose ranks run this call together, each with its own sequences (as FSDP does, whose
            collectives have to match): they run as many microbatches as the rank that needs most, of which those that
            are left over learn nothing. All ranks by default where torch.distributed is initialised.
        model_inputs: for each sequence further keywords of the model's forward on it alone (`pixel_values`, ...), empty
            where it has none; a tensor with a value for each token has those of the completion, too. They are brought
            to the model's device, and its dtype, when they are needed. Sequences then run one by one, in one process.

    Returns:
        Statistics of each token, `(sequences, longest)` each, on the model's device: a row for each sequence in the
        order that was given, padded on the right with zeros and False. Nothing has a graph. `loss` is a scalar, of this
        rank's sequences.

    Raises:
        ValueError: sequences that are empty, no token ids, or longer than the model takes or than `row_tokens`; masks
            of other lengths: all of them, by number, before anything runs, and on all ranks if on any.
        HeadError, UnknownArgumentError, UnknownOptionError: as for `token_logprobs`.
    """
    Sampling(temperature, top_k, top_p)
    chunk_tokens(chunk_size)
    if not isinstance(loss_terms, torch.Tensor):
        loss_terms = parse_option(LossTerms, loss_terms, "loss_terms", "or a number of each sequence")
    models = [innermost(part) for part in (model, reference) if part is not None]
    device = next(model.parameters()).device
    own = [] if model_inputs is None or not any(model_inputs) else list(model_inputs)
    ids, problems = _ids(sequences, models, row_tokens)
    problems += _wrong_inputs(own, len(sequences), group)
    scores, wrong = _scores(score, ids)
    _agree([*problems, *wrong, *_wrong_terms(loss_terms, len(sequences))], len(ids), group, device)
    layout = Layout.ALONE if own else layout_of(*models)
    units, limit = _units([len(row) for row in ids], layout, loss_terms, row_tokens, device)
    (count,) = largest([len(microbatches.fewest(units, layout, limit))], group, device)
    planned = microbatches.levelled(units, layout, limit, count)
    options: dict[str, Any] = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "entropy": entropy}
    options |= {"reference": reference, "chunk_size": chunk_size}
    batch = Batch([row.to(device) for row in ids], [row.to(device) for row in scores], device, own)
    parts = [Part.of(batch, part, layout) for part in planned]
    return Accumulation(model, batch, parts, count, options, loss, loss_terms, group).run()


# What is given


def _ids(
    sequences: Sequence[Tokens], models: Sequence[nn.Module], row_tokens: int | None
) -> tuple[list[torch.Tensor], list[str]]:
    """Token ids of each sequence, `(length,)` int64, and what is wrong with them."""
    problems = []
    if isinstance(sequences, torch.Tensor):
        problems.append("a tensor is no list of sequences: `token_logprobs` takes padded and packed batches")
    if row_tokens is not None and row_tokens < 1:
        problems.append(f"row_tokens={row_tokens}: expected at least 1")
    limits = {model_limit(config): "the model takes" for part in models if (config := _config(part)) is not None}
    limits |= {row_tokens: "row_tokens allows"}
    ids = []
    for number, sequence in enumerate(sequences if not problems else ()):
        try:
            row = torch.as_tensor(sequence)
        except (TypeError, ValueError, RuntimeError) as error:
            row = torch.zeros(1, dtype=torch.long)
            problems.append(f"sequence {number} is no list of token ids: {error}")
        ids.append(row)
        if not row.numel():
            problems.append(f"sequence {number} is empty")
        elif row.ndim != 1 or row.is_floating_point() or row.dtype == torch.bool:
            problems.append(f"sequence {number} is {tuple(row.shape)} of {row.dtype}: expected token ids, (length,)")
        elif (lowest := int(row.min())) < 0:
            problems.append(f"sequence {number} has the token id {lowest}: give sequences without padding")
        for limit, what in limits.items():
            if limit is not None and row.ndim == 1 and len(row) > limit:
                problems.append(f"sequence {number} has {len(row):,} tokens, and {what} {limit:,}")
    return [row.long() for row in ids], problems


def _config(model: nn.Module) -> PreTrainedConfig | None:
    config: Any = getattr(model, "config", None)
    return config if isinstance(config, PreTrainedConfig) else None


def _scores(score: Sequence[Mask] | None, ids: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[str]]:
    """Which tokens are scored, `(length,)` bool each, and what is wrong with it."""
    if score is None or not ids:
        return [torch.ones_like(row, dtype=torch.bool) for row in ids], []
    if len(score) != len(ids):
        return [], [f"score has {len(score)} masks for {len(ids)} sequences"]
    masks, wrong = [], []
    for number, (given, row) in enumerate(zip(score, ids, strict=True)):
        try:
            mask = torch.as_tensor(given).bool()
        except (TypeError, ValueError, RuntimeError) as error:
            mask = torch.ones_like(row, dtype=torch.bool)
            wrong.append(f"score of sequence {number} is no list of bools: {error}")
        masks.append(mask)
        if mask.shape != row.shape:
            wrong.append(
                f"score of sequence {number} is {tuple(mask.shape)}: expected {tuple(row.shape)}, as its token ids"
            )
    return masks, wrong


def _wrong_terms(terms: LossTerms | str | torch.Tensor, count: int) -> list[str]:
    if not isinstance(terms, torch.Tensor) or terms.shape == (count,):
        return []
    return [f"loss_terms is {tuple(terms.shape)}: expected ({count},)"]


def _wrong_inputs(own: Sequence[Mapping[str, Any]], count: int, group: Any) -> list[str]:
    wrong = [f"there are model_inputs for {len(own)} of {count} sequences"] if own and len(own) != count else []
    if own and ranks_of(group) > 1:  # whose forwards have to be alike, towers included
        wrong.append(f"model_inputs: expected one process, not {ranks_of(group)} ranks")
    return wrong


SHOWN = 20
"""Problems that an error lists."""


def _agree(problems: list[str], count: int, group: Any, device: torch.device) -> None:
    """Raise on every rank if there are problems on some, so that none waits for another."""
    if not problems and not count and ranks_of(group) == 1:
        problems = ["there are no sequences"]
    (elsewhere,) = largest([len(problems)], group, device)
    if problems:
        more = [f"and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
        raise ValueError("; ".join([*problems[:SHOWN], *more]))
    if elsewhere:
        raise ValueError(f"another rank has sequences with {elsewhere} problems: see its error")


def _units(
    lengths: Sequence[int],
    layout: Layout,
    terms: LossTerms | str | torch.Tensor,
    row_tokens: int | None,
    device: torch.device,
) -> tuple[list[Microbatch], int]:
    """What is to run together, taken apart where it is more than the budget; and the budget."""
    alone = [Microbatch.of([number], lengths) for number in range(len(lengths))]
    usual = microbatches.ROW_TOKENS_OF_CPU if device.type == "cpu" else microbatches.ROW_TOKENS_OF_GPU
    units = alone
    if isinstance(terms, torch.Tensor) and layout is not Layout.ALONE:
        together: dict[Any, Microbatch] = {}
        for unit, number in zip(alone, terms.tolist(), strict=True):
            together[number] = together.get(number, Microbatch()) + unit
        units = list(together.values())
    sizes = [microbatches.size(layout, unit) for unit in units]
    limit = max([usual, *sizes]) if row_tokens is None else row_tokens
    fits = [unit for unit, tokens in zip(units, sizes, strict=True) if tokens <= limit]
    rest = {number for unit in units for number in unit.numbers} - {number for unit in fits for number in unit.numbers}
    return fits + [alone[number] for number in sorted(rest)], limit
