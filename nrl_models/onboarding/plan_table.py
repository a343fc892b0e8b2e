"""The result of `nrl-models plan`, and its table. Has no heavy imports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.table import Table

GIB = 2**30
MIB = 2**20

ROWS = {
    "parameters": "this rank's share",
    "gradients": "this rank's share",
    "optimizer": "this rank's share of AdamW's two states",
    "gathered": "two layers, embeddings and head, unsharded, with gradients",
    "activations": "of one micro-batch",
    "buffers": "on every rank",
}

ROWS_OF_STAGES = ROWS | {
    "gathered": "two layers, embeddings and head, unsharded; all gradients of the stages",
    "activations": "of all micro-batches in flight",
}
"""Descriptions with `pp`."""


@dataclass(frozen=True, slots=True)
class PlanReport:
    """Memory and communication of a model on one rank.

    Attributes:
        model, mesh: the model and the mesh, as text.
        assumptions: sequence length, micro-batch, dtypes and activation checkpointing, as text.
        ranks: how many there are.
        memory: bytes of a device.
        figures: bytes by kind, see `Estimate`.
        verdict: whether it fits, and what to change if not.
        fits: the same.
    """

    model: str
    mesh: str
    assumptions: str
    ranks: int
    memory: int
    figures: dict[str, Any]
    verdict: str
    fits: bool

    def table(self) -> Table:
        """Return the figures by kind, with a description of each."""
        has_stages = "pp" in self.figures["traffic"]
        ranks = f"of the fullest of {self.ranks} ranks" if has_stages else f"per rank ({self.ranks} ranks)"
        ranks = "of one device" if self.ranks == 1 else ranks
        title = f"{self.model} over {self.mesh}, {self.assumptions}: memory {ranks}"
        table = Table(title=title, title_justify="left")
        table.add_column("")
        total = self.figures["total"]
        unit, size = ("GiB", GIB) if min(total, self.memory) >= GIB else ("MiB", MIB)
        table.add_column(unit, justify="right")
        table.add_column("")
        for name, remark in (ROWS_OF_STAGES if has_stages else ROWS).items():
            table.add_row(name, _rounded(self.figures[name] / size, total / size), remark)
        table.add_row("total", _rounded(total / size, total / size), f"a device has {_limit(self.memory)} (--memory)")
        sent = self.figures["traffic"] if self.ranks > 1 else {}
        for dimension, nbytes in sent.items():
            row = f"sent over {dimension}", _rounded(nbytes / size, total / size), "traffic per step of one micro-batch"
            table.add_row(*row)
        return table


def with_unit(nbytes: int) -> str:
    """Return a size with two or three significant digits, in GiB, or MiB below 1 GiB."""
    unit, size = ("GiB", GIB) if nbytes >= GIB else ("MiB", MIB)
    return f"{_rounded(nbytes / size, nbytes / size)} {unit}"


def compared(total: int, limit: int) -> str:
    """Return `needs TOTAL, a device has LIMIT`, both in MiB if the limit is below 1 GiB."""
    return f"needs {_mebibytes(total) if limit < GIB else with_unit(total)}, a device has {_limit(limit)}"


def _limit(nbytes: int) -> str:
    return f"{nbytes / GIB:.4g} GiB" if nbytes >= GIB else _mebibytes(nbytes)


def _mebibytes(nbytes: int) -> str:
    return f"{_rounded(nbytes / MIB, nbytes / MIB)} MiB"


def _rounded(value: float, largest: float) -> str:
    """Return a value with as many decimals as `largest` has with three significant digits: estimates have no more."""
    decimals = 0 if largest >= 100 else 1 if largest >= 10 else 2
    smallest = 10.0**-decimals
    return "0" if value == 0 else f"<{smallest:g}" if value < smallest / 2 else f"{value:,.{decimals}f}"
