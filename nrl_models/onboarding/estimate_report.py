"""`nrl-models plan`: estimate what training takes, with advice if it does not fit."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path

from nrl_models import registry
from nrl_models.common.checkpoint.resolve_folder import resolve_folder
from nrl_models.common.config.positions import model_limit
from nrl_models.common.dtypes import dtype_name
from nrl_models.loading.read_config import read_config
from nrl_models.onboarding.estimate import estimate
from nrl_models.onboarding.estimate_step import Setting
from nrl_models.onboarding.plan_changes import remedies
from nrl_models.onboarding.plan_table import GIB, PlanReport, compared, with_unit


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
    rank_estimate = estimate(config, setting)
    limit = int(memory * GIB)
    fits = rank_estimate.total <= limit
    verdict = f"fits: {compared(rank_estimate.total, limit)}"
    if not fits:
        kinds = ("parameters", "gradients", "optimizer", "gathered", "activations")
        largest = max(kinds, key=lambda kind: getattr(rank_estimate, kind))
        lines = [f"does not fit: {compared(rank_estimate.total, limit)}; largest part: {largest}"]
        changes = remedies(config, setting, limit, rank_estimate.total_parameters)
        lines += [f"  fits with {change}: {with_unit(then.total)}" for change, then in changes.items()]
        if not changes:
            lines.append("  256 times the ranks, --dtype bfloat16 and an eighth of --seq-len together would not fit")
        verdict = "\n".join(lines)
    if (longest := model_limit(config)) is not None and setting.seq_len > longest:
        verdict += f"\n--seq-len {setting.seq_len:,} exceeds the model's limit of {longest:,} tokens"
    name = (config.architectures or [type(config).__name__])[0]
    sizes = ", ".join(f"{dimension}={size}" for dimension, size in setting.mesh.items())
    model = f"{name} ({_count(rank_estimate.total_parameters)} parameters)"
    assumptions = f"{setting.seq_len:,} tokens, micro-batch {setting.micro_batch}, "
    assumptions += f"{dtype_name(setting.dtype)} states, {dtype_name(setting.compute)} compute, "
    assumptions += f"activation checkpointing {'on' if setting.checkpointing else 'off'}"
    figures = asdict(rank_estimate) | {"total": rank_estimate.total}
    return PlanReport(model, sizes, assumptions, math.prod(setting.mesh.values()), limit, figures, verdict, fits)


def _count(parameters: int) -> str:
    if parameters >= 1e9:
        return f"{parameters / 1e9:.1f}B"
    return f"{parameters / 1e6:.0f}M" if parameters >= 1e8 else f"{parameters / 1e6:.1f}M"
