"""`nrl-models plan`: an estimate as a table, and what to change if it does not fit."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from nrl_models import registry
from nrl_models.common.checkpoint.files import resolve_folder
from nrl_models.loading.read_config import read_config
from nrl_models.onboarding.estimate import GIB, Setting, estimate, remedies

ROWS = {
    "parameters": "kept, sharded",
    "gradients": "kept, sharded",
    "optimizer": "two states of AdamW, sharded",
    "gathered": "whole at a time: two units and the outermost one, and gradients; over pp all of these",
    "activations": "of one micro-batch; over pp of as many as are under way",
    "buffers": "on every rank",
}


@dataclass(frozen=True, slots=True)
class PlanReport:
    """What a model takes on a rank.

    Attributes:
        model, mesh: what was asked, as text.
        ranks: how many there are.
        memory: bytes of a device.
        figures: bytes by kind, see `Estimate`.
        verdict: whether it fits, and what to change if not.
        fits: the same.
    """

    model: str
    mesh: str
    ranks: int
    memory: int
    figures: dict[str, Any]
    verdict: str
    fits: bool

    def table(self) -> Table:
        """The figures by kind, with what each of them is."""
        ranks = (
            f"the fullest of {self.ranks} ranks" if "pp" in self.figures["traffic"] else f"each of {self.ranks} ranks"
        )
        table = Table(title=f"{self.model} over {self.mesh}: {ranks}", title_justify="left")
        table.add_column("")
        table.add_column("GiB", justify="right")
        table.add_column("")
        for name, remark in ROWS.items():
            table.add_row(name, f"{self.figures[name] / GIB:.2f}", remark)
        table.add_row("total", f"{self.figures['total'] / GIB:.2f}", f"of {self.memory / GIB:.0f}")
        for dimension, sent in self.figures["traffic"].items():
            table.add_row(f"sent over {dimension}", f"{sent / GIB:.2f}", "in a step of one micro-batch")
        return table


def plan_report(path: str | Path, setting: Setting, memory: float) -> PlanReport:
    """Estimate what training takes, and say whether it fits.

    Args:
        path: a directory with a configuration.
        setting: how the model is to be trained.
        memory: GiB of a device.

    Raises:
        ShardingError: a mesh that does not divide the model.
    """
    registry.register_custom_configs()
    config = read_config(resolve_folder(path))
    found = estimate(config, setting)
    limit = int(memory * GIB)
    fits = found.total <= limit
    verdict = f"fits: {found.total / GIB:.1f} of {memory:g} GiB"
    if not fits:
        kinds = ("parameters", "gradients", "optimizer", "gathered", "activations")
        largest = max(kinds, key=lambda kind: getattr(found, kind))
        lines = [f"does not fit: {found.total / GIB:.1f} of {memory:g} GiB; most of it is {largest}"]
        changes = remedies(config, setting, limit)
        lines += [f"  what to change: {change} takes {then.total / GIB:.1f} GiB" for change, then in changes.items()]
        if not changes:
            lines.append(
                "  no single change makes it fit: combine more ranks of fsdp with tp or ep, and shorter sequences"
            )
        verdict = "\n".join(lines)
    name = (config.architectures or [type(config).__name__])[0]
    sizes = ", ".join(f"{dimension}={size}" for dimension, size in setting.mesh.items())
    model = f"{name} ({found.total_parameters / 1e9:.1f}B parameters)"
    figures = asdict(found) | {"total": found.total}
    return PlanReport(model, sizes, math.prod(setting.mesh.values()), limit, figures, verdict, fits)
