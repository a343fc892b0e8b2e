"""Diagnostic 3: find untrained embedding rows in a checkpoint's files.

Rows of tokens that pretraining never saw (reserved special tokens, padding of the vocabulary) stay near zero, constant,
or equal to each other. In post-training, a prompt with such a token makes gradients explode. Only the embeddings are
read. `embedding_rows` defines when a row is untrained.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import safetensors.torch
import torch
from safetensors import safe_open
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from nrl_models.auto import auto_class_for
from nrl_models.common.checkpoint.files import CheckpointFiles
from nrl_models.common.checkpoint.generations import RECORD, TEMPLATES
from nrl_models.common.checkpoint.local_path import is_gguf
from nrl_models.common.checkpoint.named_weights import is_index, movable_index
from nrl_models.common.checkpoint.resolve_folder import resolve_folder
from nrl_models.common.checkpoint.writing import folder_to_write, require_replaceable, staged
from nrl_models.common.dtypes import dtype_name
from nrl_models.common.gguf.gguf_files import open_files
from nrl_models.common.modules import class_name, input_embeddings
from nrl_models.common.state_dict.adapter import StateDictAdapter
from nrl_models.common.state_dict.ties import have_same_values
from nrl_models.common.trust.inside import files_inside
from nrl_models.diagnostics.embedding_rows import (
    IDENTICAL,
    NEAR_ZERO,
    SAME_DIRECTION,
    SMALL,
    EmbeddingSummary,
    summarize,
)
from nrl_models.diagnostics.result import Diagnosis
from nrl_models.errors import CheckpointError, Problem, ProblemKind
from nrl_models.loading.read_config import read_config
from nrl_models.parity.parity_report import Unit

SHOWN_TOKENS, SHOWN_GROUPS = 12, 8
"""Maximum number of tokens to name in a line, and of groups to list."""


def diagnose_embeddings(
    path: str | Path,
    *,
    near_zero: float = NEAR_ZERO,
    identical: float = IDENTICAL,
    reinitialize: str | Path | None = None,
    overwrite: bool = False,
    seed: int = 0,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Diagnosis:
    """Find untrained rows of the input and output embeddings.

    Args:
        path: Directory of the checkpoint. Nested text models and tied embeddings are supported.
        near_zero: A row is near zero if all absolute values are below this.
        identical: A row's values are identical if their standard deviation is below this.
        reinitialize: Directory for a copy of the checkpoint in which rows near zero, flat, or at the mean are
            reinitialized from a normal distribution with the standard deviation of the healthy rows. None writes
            nothing. Duplicates and clusters are kept, because in output embeddings they make sure that their tokens are
            never predicted.
        overwrite: Whether to replace a checkpoint in `reinitialize`.
        seed: Random seed of the new rows.
        tokenizer: Tokenizer to show the rows' tokens.

    Raises:
        CheckpointError: If the files have no embeddings, or are damaged. Also if `reinitialize` is the checkpoint
            itself, or has a checkpoint and `overwrite` is False.
        UnknownArgumentError: If no directory can have the path `reinitialize`, see `folder_to_write`.
    """
    folder = resolve_folder(path)
    if reinitialize is not None:
        reinitialize = folder_to_write(reinitialize)
        require_replaceable(folder, reinitialize, overwrite=overwrite)
    if reinitialize is not None and is_gguf(folder):
        problem = Problem(ProblemKind.FORMAT, folder.name, "is a GGUF file, and rows are reinitialized in safetensors")
        raise CheckpointError("cannot reinitialize", [problem], ["write it with `nrl-models convert` first"])
    config, names = read_config(folder).get_text_config(), token_names(tokenizer)
    result = Diagnosis("embeddings", str(path))
    with closing(open_files(folder)) as files:
        embedding_keys, tied = find_embeddings(folder, files)
        summaries: list[EmbeddingSummary] = []
        for kind, (key, *copies) in embedding_keys.items():
            if summaries and summaries[0].key == key:
                summaries.append(replace(summaries[0], kind=kind))
                continue
            padding = padding_row(config) if kind == "Input" else None
            weight = files.read(files.tensors[key])
            summary = summarize(kind, key, weight, near_zero=near_zero, identical=identical, padding=padding)
            summaries.append(replace(summary, copies=tuple(copies)))
    for number, summary in enumerate(summaries):
        if number and tied:
            result.lines += ["", f"{summary.kind} embeddings: tied to the input embeddings"]
        else:
            result.lines += [""] * bool(number)
            result.lines += _lines(summary, near_zero, identical, names)
    result.lines.append("")
    result.measured = {
        "tied": tied,
        "thresholds": {"near_zero": near_zero, "identical": identical},
        "embeddings": [summary.to_json() for summary in summaries],
    }
    if reinitialize is not None:
        changed = write_reinitialized(folder, reinitialize, summaries, seed)
        result.lines += [f"Wrote {reinitialize} with {changed} rows reinitialized."]
        result.measured["reinitialized"] = str(reinitialize)
    untrained = {row for summary in summaries for row in summary.untrained.all}
    degenerate = {row for summary in summaries for row in summary.untrained.degenerate}
    result.value, result.bound, result.unit = len(untrained), 0, Unit.COUNT
    if not untrained:
        return result.finish()
    finding = f"{len(untrained)} embedding rows look untrained; prompts with these tokens give large gradients."
    if degenerate:
        finding += f" --reinitialize DIR writes the checkpoint with {len(degenerate)} of them reinitialized."
    if len(degenerate) < len(untrained):
        finding += " Equal and clustered rows are often reserved tokens, or markers of the chat template."
        finding += " Train the embeddings if your data has such tokens."
    if any(summary.untrained.duplicates for summary in summaries):
        finding += " If the weights were quantized, rounding may have made rows equal."
    return result.finish(finding)


def find_embeddings(folder: Path, files: CheckpointFiles) -> tuple[dict[str, list[str]], bool]:
    """Return the keys of input and output embeddings in the files by kind, and whether they are tied.

    Tied embeddings may be stored under several keys. Keys with different values are not tied, although the
    configuration ties them: transformers then loads both.

    Raises:
        CheckpointError: If the files have no input embeddings.
    """
    model = auto_class_for(folder).from_config(read_config(folder), device="meta")
    adapter = StateDictAdapter(model)
    modules = {"Input": input_embeddings(model), "Output": model.get_output_embeddings()}
    names = {id(module): name for name, module in model.named_modules(remove_duplicate=False)}
    result: dict[str, list[str]] = {}
    for kind, module in modules.items():
        if module is None:
            continue
        name = f"{names[id(module)]}.weight"
        source = adapter.tied.get(name, name)
        candidates = [name, source, *(other for other, tied_to in adapter.tied.items() if tied_to == source)]
        keys = dict.fromkeys(
            key
            for candidate in candidates
            for layout in ("hub", "transformers")
            for key in [*(tensor.name for tensor in adapter.tensors_in(candidate, layout)), candidate]
            if key in files.tensors
        )
        known = result.get("Input", [])
        if keys and (first := next(iter(keys))) in known:
            result[kind] = known
        elif keys:
            others = (key for key in keys if key not in (first, *known))
            result[kind] = [first, *(key for key in others if _are_equal(files, first, key))]
    if "Input" not in result:
        missing = "the input embeddings", f"are not one module of {class_name(model)}"
        if modules["Input"] is not None:
            missing = f"{names[id(modules['Input'])]}.weight", "is in none of the files"
        raise CheckpointError(f"{folder} holds no input embeddings", [Problem(ProblemKind.MISSING, *missing)])
    tied = result.get("Output", result["Input"]) is result["Input"]
    return result, tied and modules["Output"] is not None


def _are_equal(files: CheckpointFiles, first: str, second: str) -> bool:
    """Return True if two stored tensors have the same values."""
    return have_same_values(files.read(files.tensors[first]), files.read(files.tensors[second]))


def padding_row(config: PreTrainedConfig) -> int | None:
    """Return the row of a token that is only used for padding; None if there is none.

    transformers initializes it to zeros, and torch never trains it.
    """
    padding = getattr(config, "pad_token_id", None)
    ends = getattr(config, "eos_token_id", None)
    others = [getattr(config, "bos_token_id", None), *(ends if isinstance(ends, list) else [ends])]
    return padding if isinstance(padding, int) and padding >= 0 and padding not in others else None


def token_names(tokenizer: PreTrainedTokenizerBase | None) -> Callable[[Sequence[int]], str]:
    """Return a function that shows the tokens of some rows in a line; without a tokenizer, an empty string."""
    tokens = {} if tokenizer is None else {row: token for token, row in tokenizer.get_vocab().items()}

    def line(rows: Sequence[int]) -> str:
        known = [row for row in rows if row in tokens]
        names = [repr(tokens[row]) for row in known[:SHOWN_TOKENS]]
        names += [f"and {len(known) - SHOWN_TOKENS} more"] * (len(known) > SHOWN_TOKENS)
        names += [f"{len(rows) - len(known)} without a token"] * (len(known) < len(rows))
        return ", ".join(names)

    return line if tokens else lambda rows: ""


def _lines(
    summary: EmbeddingSummary,
    near_zero: float,
    identical: float,
    names: Callable[[Sequence[int]], str],
) -> Iterator[str]:
    untrained, count = summary.untrained, summary.shape[0]
    yield f"{summary.kind} embeddings: {summary.key}, shape {summary.shape}, {dtype_name(summary.dtype)}"

    def counted(title: str, rows: int) -> str:
        return f"{title}: {rows}/{count} ({rows / max(count, 1):.1%})"

    def listed(rows: Sequence[int], label: str = "Indices") -> Iterator[str]:
        yield f"  {label}: {ranges(rows)}"
        if named := names(rows):
            yield f"  Tokens: {named}"

    for rows, title in (
        (untrained.not_finite, "Embeddings with NaN or infinite values"),
        (untrained.near_zero, f"Near-zero embeddings (abs < {near_zero:.2e})"),
        (untrained.identical, f"Identical embeddings (std < {identical:.2e})"),
        (untrained.flat, f"Flat embeddings (std < {SMALL:.0%} of the median)"),
        (untrained.at_mean, f"Embeddings at the mean (distance < {SMALL:.0%} of the median)"),
    ):
        yield counted(title, len(rows))
        if rows:
            yield from listed(rows)
    for groups, title in (
        (untrained.duplicates, "Duplicate embeddings (equal bit for bit)"),
        (untrained.clusters, f"Clustered embeddings (cosine > {SAME_DIRECTION:g} with a center)"),
    ):
        yield counted(title, sum(map(len, groups)))
        for group in groups[:SHOWN_GROUPS]:
            yield from listed(group, f"{len(group)} rows")
        if len(groups) > SHOWN_GROUPS:
            yield f"  ... and {len(groups) - SHOWN_GROUPS} more groups"
    if untrained.padding is not None:
        yield f"Row {untrained.padding} is the padding token's, and zero, as transformers leaves it: not counted"
    low, high = summary.std_range
    yield (
        f"Statistics: mean_abs={summary.mean_abs:.6f}, max_abs={summary.max_abs:.6f}, std_range=[{low:.6f}, {high:.6f}]"
    )
    if not untrained.all:
        yield "No untrained rows found"
        return
    also = {
        "flat": len(untrained.flat),
        "mean": len(untrained.at_mean),
        "duplicate": sum(map(len, untrained.duplicates)),
        "clustered": sum(map(len, untrained.clusters)),
    }
    yield ", ".join(
        [
            f"Potential issues: {len(untrained.near_zero)} near-zero embeddings",
            f"{len(untrained.identical)} identical embeddings",
            *(f"{number} {kind} embeddings" for kind, number in also.items() if number),
        ]
    )


def _not_copied(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if name == RECORD or (name != TEMPLATES and Path(folder, name).is_dir())]


def ranges(indices: Sequence[int]) -> str:
    """Return sorted indices as text: `0-1,3-999,1192`."""
    # In a run of consecutive indices, the difference between an index and its position is constant.
    runs = [[index for _, index in run] for _, run in groupby(enumerate(indices), lambda pair: pair[1] - pair[0])]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def write_reinitialized(folder: Path, target: Path, summaries: Sequence[EmbeddingSummary], seed: int) -> int:
    """Write the checkpoint to `target` with untrained rows reinitialized. Its other files are copied unchanged.

    Subdirectories are not copied, except the one with chat templates.

    Returns:
        Number of reinitialized rows.

    Raises:
        CheckpointError: If no row is healthy, or a link leaves the directory.
    """
    files = files_inside(folder, _not_copied)
    without_healthy = [each.key for each in summaries if each.untrained.degenerate and each.healthy_std == 0.0]
    if without_healthy:
        raise CheckpointError(
            "cannot reinitialize",
            [
                Problem(ProblemKind.FORMAT, key, "has no healthy row to take a standard deviation from")
                for key in without_healthy
            ],
        )
    changed = {summary.key: summary for summary in summaries if summary.untrained.degenerate}
    generator = torch.Generator().manual_seed(seed)
    new_rows: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    for summary in changed.values():
        rows = torch.tensor(summary.untrained.degenerate)
        new = torch.randn(len(rows), summary.shape[1], generator=generator) * summary.healthy_std
        new_rows |= dict.fromkeys((summary.key, *summary.copies), (rows, new.to(summary.dtype)))
    with staged(target) as stage:
        for path, source in files.items():
            keys: list[str] = []
            if path.suffix == ".safetensors":
                with safe_open(source, "pt") as stored:
                    keys, metadata = sorted(new_rows.keys() & set(stored.keys())), stored.metadata()
            if not keys:
                (stage / path).parent.mkdir(exist_ok=True)
                if is_index(path.name) and (index := movable_index(folder / path)) is not None:
                    (stage / path).write_text(json.dumps(index, indent=2))
                else:
                    shutil.copy2(source, stage / path)
                continue
            tensors = safetensors.torch.load_file(source)
            for key in keys:
                rows, new = new_rows[key]
                tensors[key][rows] = new.to(tensors[key])
            safetensors.torch.save_file(tensors, stage / path, metadata=metadata)
    return sum(len(summary.untrained.degenerate) for summary in changed.values())
