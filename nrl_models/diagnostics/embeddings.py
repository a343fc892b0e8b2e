"""Diagnostic 3: embedding rows that were never trained, found in a checkpoint's files.

Rows of tokens that pretraining never saw (reserved special tokens, padding of the vocabulary) stay near zero or
constant, and make gradients explode in post-training once a prompt has such a token. Only the embeddings are read.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import safe_open

from nrl_models.auto import auto_class_for
from nrl_models.common.checkpoint.files import CheckpointFiles, StoredTensor, resolve_folder
from nrl_models.common.checkpoint.writing import staged
from nrl_models.common.dtypes import dtype_name
from nrl_models.common.state_dict.adapter import StateDictAdapter
from nrl_models.diagnostics.result import Diagnosis
from nrl_models.errors import CheckpointError, Problem, ProblemKind
from nrl_models.loading.read_config import read_config
from nrl_models.parity.parity_report import Outcome

NEAR_ZERO = 1e-10
IDENTICAL = 1e-8
"""The guide's thresholds: on the largest absolute value of a row, and on its standard deviation."""

ROWS_AT_A_TIME = 8192


@dataclass(frozen=True, slots=True)
class EmbeddingSummary:
    """Statistics of the rows of one embedding.

    Args:
        kind: `Input` or `Output`.
        key: the tensor's name in the files.
        shape, dtype: of the tensor.
        near_zero: rows whose values are all below the first threshold.
        identical: rows whose values hardly differ from each other.
        mean_abs, max_abs: over all values.
        std_range: the smallest and largest standard deviation of a row.
        healthy_std: standard deviation over the values of all other rows; 0 if there are none.
    """

    kind: str
    key: str
    shape: tuple[int, int]
    dtype: torch.dtype
    near_zero: list[int]
    identical: list[int]
    mean_abs: float
    max_abs: float
    std_range: tuple[float, float]
    healthy_std: float

    @property
    def untrained(self) -> list[int]:
        """Rows that are near zero or identical."""
        return sorted({*self.near_zero, *self.identical})

    def to_json(self) -> dict[str, Any]:
        """By name."""
        return asdict(self) | {"kind": self.kind.lower(), "dtype": dtype_name(self.dtype)}


def diagnose_embeddings(
    path: str | Path,
    *,
    near_zero: float = NEAR_ZERO,
    identical: float = IDENTICAL,
    reinitialise: Path | None = None,
    seed: int = 0,
) -> Diagnosis:
    """Find untrained rows of the input and output embeddings.

    Args:
        path: the checkpoint's directory. Nested text models and tied embeddings are found, too.
        near_zero: a row is near zero if no absolute value reaches this.
        identical: a row's values are identical if their standard deviation is below this.
        reinitialise: where to write the checkpoint with such rows reinitialised, from a normal distribution with the
            standard deviation of the healthy rows; None writes nothing.
        seed: of the new rows.

    Raises:
        CheckpointError: no embeddings in the files, or damaged files.
    """
    folder = resolve_folder(path)
    result = Diagnosis("embeddings", str(path))
    with closing(CheckpointFiles(folder)) as files:
        found, tied = find_embeddings(folder, files)
        summaries = [
            summarise(kind, key, files.read(stored), near_zero=near_zero, identical=identical)
            for kind, (key, stored) in found.items()
        ]
    result.lines += ["=" * 80, "EMBEDDING SUMMARIES", "=" * 80]
    for summary in summaries:
        result.lines += ["", *_lines(summary, tied, near_zero, identical)]
    result.measured = {
        "tied": tied,
        "thresholds": {"near_zero": near_zero, "identical": identical},
        "embeddings": [summary.to_json() for summary in summaries],
    }
    if reinitialise is not None:
        changed = write_reinitialised(folder, reinitialise, summaries, seed)
        result.lines += ["", f"Wrote {reinitialise} with {changed} rows reinitialised."]
        result.measured["reinitialised"] = str(reinitialise)
    result.lines += ["", "=== Final Summary ===", f"Model: {path}", "Analysis complete."]
    result.outcome = Outcome.of(not any(summary.untrained for summary in summaries))
    return result


def find_embeddings(folder: Path, files: CheckpointFiles) -> tuple[dict[str, tuple[str, StoredTensor]], bool]:
    """The stored tensors of the input and output embeddings, by kind, and whether they are tied.

    Raises:
        CheckpointError: the files hold no input embeddings.
    """
    model = auto_class_for(folder).from_config(read_config(folder), device="meta")
    adapter = StateDictAdapter(model)
    modules = {"Input": model.get_input_embeddings(), "Output": model.get_output_embeddings()}
    names = {id(module): name for name, module in model.named_modules(remove_duplicate=False)}
    result: dict[str, tuple[str, StoredTensor]] = {}
    for kind, module in modules.items():
        if module is None:
            continue
        name = f"{names[id(module)]}.weight"
        for candidate in (name, adapter.tied.get(name, name)):
            keys = [
                tensor.name for layout in ("hub", "transformers") for tensor in adapter.tensors_in(candidate, layout)
            ]
            stored = next((key for key in [*keys, candidate] if key in files.tensors), None)
            if stored is not None:
                result[kind] = (stored, files.tensors[stored])
                break
    if "Input" not in result:
        raise CheckpointError(
            f"{folder} holds no input embeddings",
            [Problem(ProblemKind.MISSING, names[id(modules["Input"])] + ".weight", "is in none of the files")],
        )
    tied = "Output" not in result or result["Output"][0] == result["Input"][0]
    return result, tied and modules["Output"] is not None


def summarise(
    kind: str, key: str, weight: torch.Tensor, *, near_zero: float = NEAR_ZERO, identical: float = IDENTICAL
) -> EmbeddingSummary:
    """Statistics of every row of `weight`, `(vocabulary, hidden)`, in fp32; sums are in fp64."""
    found = []
    for rows in weight.split(ROWS_AT_A_TIME):
        rows = rows.float()
        exact = rows.double()
        largest, deviation = rows.abs().amax(1), rows.std(dim=1, correction=0)
        found.append(torch.stack([largest, deviation, exact.abs().sum(1), exact.sum(1), exact.square().sum(1)]))
    largest, deviation, absolute, total, squares = torch.cat(found, dim=1)
    zero, constant = largest < near_zero, deviation < identical
    healthy = ~(zero | constant)
    count = max(int(healthy.sum()) * weight.shape[1], 1)
    variance = squares[healthy].sum() / count - (total[healthy].sum() / count) ** 2
    return EmbeddingSummary(
        kind=kind,
        key=key,
        shape=(weight.shape[0], weight.shape[1]),
        dtype=weight.dtype,
        near_zero=zero.nonzero()[:, 0].tolist(),
        identical=constant.nonzero()[:, 0].tolist(),
        mean_abs=absolute.sum().item() / max(weight.numel(), 1),
        max_abs=largest.max().item(),
        std_range=(deviation.min().item(), deviation.max().item()),
        healthy_std=max(variance.item(), 0.0) ** 0.5,
    )


def _lines(summary: EmbeddingSummary, tied: bool, near_zero: float, identical: float) -> Iterator[str]:
    note = f" (Tied: {tied})" if summary.kind == "Output" else ""
    yield f"--- {summary.kind} Embeddings Summary{note} ---"
    yield f"Shape: {torch.Size(summary.shape)}, Dtype: {summary.dtype}, Key: {summary.key}"
    for rows, what in (
        (summary.near_zero, f"Near-zero embeddings (abs < {near_zero:.2e})"),
        (summary.identical, f"Identical embeddings (std < {identical:.2e})"),
    ):
        yield f"{what}: {len(rows)}/{summary.shape[0]} ({len(rows) / max(summary.shape[0], 1):.1%})"
        if rows:
            yield f"  Indices: {ranges(rows)}"
    low, high = summary.std_range
    yield (
        f"Statistics: mean_abs={summary.mean_abs:.6f}, max_abs={summary.max_abs:.6f}, std_range=[{low:.6f}, {high:.6f}]"
    )
    if summary.untrained:
        yield (
            f"⚠️ POTENTIAL ISSUES: {len(summary.near_zero)} near-zero embeddings, {len(summary.identical)} identical "
            "embeddings"
        )
    else:
        yield "✅ No obvious untrained patterns detected"


def ranges(indices: Sequence[int]) -> str:
    """Sorted indices as `0-1,3-999,1192`."""
    # Within a run an index and its place in the list grow alike.
    runs = [[index for _, index in run] for _, run in groupby(enumerate(indices), lambda pair: pair[1] - pair[0])]
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def write_reinitialised(folder: Path, target: Path, summaries: Sequence[EmbeddingSummary], seed: int) -> int:
    """Write the checkpoint to `target` with untrained rows reinitialised; everything else is copied byte for byte.

    Returns:
        How many rows were drawn.

    Raises:
        CheckpointError: `target` is the checkpoint itself, or no row is healthy.
    """
    if target.exists() and target.resolve() == folder.resolve():
        raise CheckpointError(
            "cannot re-initialise in place",
            [Problem(ProblemKind.FILE, str(target), "is the checkpoint itself")],
            ["give another directory"],
        )
    without_healthy = [summary.key for summary in summaries if summary.untrained and summary.healthy_std == 0.0]
    if without_healthy:
        raise CheckpointError(
            "cannot re-initialise",
            [
                Problem(ProblemKind.FORMAT, key, "has no healthy row to take a standard deviation from")
                for key in without_healthy
            ],
        )
    changed = {summary.key: summary for summary in summaries if summary.untrained}
    generator = torch.Generator().manual_seed(seed)
    with staged(target) as stage:
        for source in sorted(path for path in folder.iterdir() if path.is_file()):
            keys: list[str] = []
            if source.suffix == ".safetensors":
                with safe_open(source, "pt") as stored:
                    keys, metadata = sorted(changed.keys() & set(stored.keys())), stored.metadata()
            if not keys:
                shutil.copy2(source, stage / source.name)
                continue
            tensors = safetensors.torch.load_file(source)
            for key in keys:
                summary = changed[key]
                rows = torch.tensor(summary.untrained)
                new = torch.randn(len(rows), summary.shape[1], generator=generator) * summary.healthy_std
                tensors[key][rows] = new.to(summary.dtype)
            safetensors.torch.save_file(tensors, stage / source.name, metadata=metadata)
    return sum(len(summary.untrained) for summary in changed.values())
