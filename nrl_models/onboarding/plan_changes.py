"""Changes of a training setup with which a model fits into memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace

import torch
from transformers import PreTrainedConfig

from nrl_models.common.dtypes import dtype_name
from nrl_models.common.mesh_sizes import DIMENSIONS
from nrl_models.errors import ShardingError
from nrl_models.onboarding.estimate import Estimate, estimate_within
from nrl_models.onboarding.estimate_step import Setting


def remedies(
    config: PreTrainedConfig, setting: Setting, memory: int, total_parameters: int, count: int = 2
) -> dict[str, Estimate]:
    """Find changes of a setting with which a model fits in `memory` bytes, the smallest of each kind first.

    Changes: activation checkpointing, a smaller micro-batch, more ranks of a dimension, states in bf16, shorter
    sequences. If none of them suffices, more ranks of `fsdp` together with more of `ep` or `tp`. If that does not
    either, more ranks of `fsdp` with states in bf16 and shorter sequences.

    Args:
        config: configuration of the model.
        setting: does not fit.
        memory: bytes of a device.
        total_parameters: number of parameters of the model.
        count: number of changes to find.

    Returns:
        The estimate for each change, by the options of `nrl-models plan` that change.
    """
    estimates: dict[str, Estimate] = {}
    for changes in (_changes(setting), _combined_changes(setting), _all_changes(setting)):
        for alternatives in changes:
            for changed in alternatives:
                # Parameters, gradients and two states, if every rank divided them evenly.
                least = 4 * total_parameters * changed.dtype.itemsize // math.prod(changed.mesh.values())
                with suppress(ShardingError):
                    if least <= memory and (result := estimate_within(config, changed, memory)) is not None:
                        estimates[_as_options(setting, changed)] = result
                        break
            if len(estimates) == count:
                return estimates
        if estimates:
            return estimates
    return estimates


def _changes(setting: Setting) -> Iterator[list[Setting]]:
    """Yield the settings that each kind of change leads to, the smallest change first."""
    if not setting.checkpointing:
        yield [replace(setting, checkpointing=True)]
    base = replace(setting, checkpointing=True, micro_batch=1)
    if setting.micro_batch > 1:
        yield [base]
    for dimension in (*(("pp",) if "pp" in setting.mesh else ()), "fsdp", "tp", "ep"):
        yield [_more_ranks(base, {dimension: factor}) for factor in (2, 4, 8, 16)]
    if setting.dtype == torch.float32:
        yield [replace(base, dtype=torch.bfloat16)]
    yield [replace(base, seq_len=setting.seq_len // factor) for factor in (2, 4, 8) if setting.seq_len >= 2 * factor]


def _combined_changes(setting: Setting) -> Iterator[list[Setting]]:
    """Yield settings with more ranks of `fsdp` and of another dimension, the fewest ranks first."""
    base = replace(setting, checkpointing=True, micro_batch=1)
    for dimension in ("ep", "tp"):
        yield [
            _more_ranks(base, {"fsdp": ranks // factor, dimension: factor})
            for ranks in (4, 8, 16, 32, 64, 128, 256)
            for factor in (2, 4, 8, 16)
            if factor < ranks
        ]


def _all_changes(setting: Setting) -> Iterator[list[Setting]]:
    """Yield settings with states in bf16, shorter sequences and more ranks of `fsdp`, the smallest change first."""
    base = replace(setting, checkpointing=True, micro_batch=1, dtype=torch.bfloat16)
    yield [
        _more_ranks(replace(base, seq_len=max(1, setting.seq_len // factor)), {"fsdp": ranks})
        for factor in (2, 4, 8)
        for ranks in (1, 2, 4, 8, 16, 32, 64, 128, 256)
    ]


def _more_ranks(setting: Setting, factors: Mapping[str, int]) -> Setting:
    """Multiply the ranks of some dimensions."""
    sizes = {name: setting.mesh.get(name, 1) * factors.get(name, 1) for name in DIMENSIONS}
    mesh = {name: size for name, size in sizes.items() if name in setting.mesh or name in factors}
    return replace(setting, mesh=mesh)


def _as_options(setting: Setting, changed: Setting) -> str:
    """Return the options of `nrl-models plan` in which two settings differ."""
    mesh = ",".join(f"{name}={size}" for name, size in changed.mesh.items())
    options = {
        "--mesh " + mesh: changed.mesh != setting.mesh,
        f"--micro-batch {changed.micro_batch}": changed.micro_batch != setting.micro_batch,
        "--checkpointing": changed.checkpointing != setting.checkpointing,
        f"--dtype {dtype_name(changed.dtype)}": changed.dtype != setting.dtype,
        f"--seq-len {changed.seq_len}": changed.seq_len != setting.seq_len,
    }
    return " ".join(option for option, differs in options.items() if differs)
