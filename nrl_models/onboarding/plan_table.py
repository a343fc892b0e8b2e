"""The result of `nrl-models plan`, and its table. Has no heavy imports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.table import Table

GIB = 2**30

ROWS = {
    "parameters": "this rank's share",
    "gradients": "this rank's share",
    "optimizer": "this rank's share of AdamW's two states",
    "gathered": "complete layers that fsdp gathers at once, and their gradients",
    "activations": "of one micro-batch",
    "buffers": "on every rank",
}

ROWS_OF_STAGES = ROWS | {
    "gathered": "complete layers that fsdp gathers at once, and all gradients of the stages",
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
        ranks = f"the fullest of {self.ranks} ranks" if has_stages else f"each of {self.ranks} ranks"
        ranks = "one device" if self.ranks == 1 else ranks
        title = f"{self.model} over {self.mesh}, {self.assumptions}: memory of {ranks}"
        table = Table(title=title, title_justify="left")
        table.add_column("")
        table.add_column("GiB", justify="right")
        table.add_column("")
        for name, remark in (ROWS_OF_STAGES if has_stages else ROWS).items():
            table.add_row(name, f"{self.figures[name] / GIB:.2f}", remark)
        table.add_row("total", f"{self.figures['total'] / GIB:.2f}", f"of {self.memory / GIB:g}")
        for dimension, sent in self.figures["traffic"].items():
            if self.ranks > 1:
                table.add_row(f"sent over {dimension}", f"{sent / GIB:.2f}", "per step of one micro-batch")
        return table
