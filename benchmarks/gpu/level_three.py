"""Section `parity`: level 3 in fp32 and bf16 on the device."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from benchmarks.gpu.context import Case, Context
from benchmarks.gpu.models import UPSTREAM, config_of, contender, labeled
from benchmarks.gpu.outcomes import CheckError
from benchmarks.gpu.sections import PATTERNS
from benchmarks.reporting import Row
from nrl_models import registry
from nrl_models.parity.check import check_parity
from nrl_models.parity.parity_report import Level
from nrl_models.testing.case import FamilyCase

BYTES_PER_PARAMETER = 4 + 4 + 4  # two models in fp32, or two in bf16 and one in fp32


def cases(context: Context) -> dict[str, Case]:
    """Return a case per family, and per large shape."""
    registry.architectures()
    families = ("llama", "qwen3_moe") if context.tiny else PATTERNS
    found: dict[str, Case] = {
        registry.FAMILIES[family][0]: partial(_family, registry.FAMILIES[family][0], context) for family in families
    }
    shapes = ("Llama 1B",) if context.tiny else ("Llama 1B", "Qwen3-MoE 30B-A3B")
    return found | {shape: partial(_shape, shape, context) for shape in shapes}


def _family(architecture: str, context: Context) -> list[Row]:
    model_class = registry.model_class(architecture)
    assert model_class is not None
    case = FamilyCase(model_class, torch.device("cpu"))
    with TemporaryDirectory() as folder:
        case.reference(torch.bfloat16).save_pretrained(folder)
        return _check(architecture, folder, context)


def _shape(shape: str, context: Context) -> list[Row]:
    config = config_of(shape, context, bytes_per_parameter=BYTES_PER_PARAMETER)
    with TemporaryDirectory() as folder:
        contender(UPSTREAM, config, context).to(torch.bfloat16).save_pretrained(folder)
        return _check(labeled(shape, config), folder, context)


def _check(name: str, folder: str | Path, context: Context) -> list[Row]:
    length = 64 if context.tiny else 256
    report = check_parity(folder, checks=[Level.LOGITS], device=context.device, length=length)
    rows: list[Row] = [
        {
            "model": name,
            "check": row.check.removeprefix("level 3: "),
            "passed": "yes" if row.passed else "no",
            "measured": row.measured,
            "required": row.expected,
        }
        for row in report.rows
    ]
    if not report.passed:
        raise CheckError(
            "; ".join(f"{row.check}: {row.measured}, expected {row.expected}" for row in report.failed), rows
        )
    return rows
