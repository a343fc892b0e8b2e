"""Write the capsule of a failing cell, and replay it."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from nrl_models.common.dtypes import dtype_name
from nrl_models.consistency.capsule.capsule_file import CapsuleKind, Contents, Limits
from nrl_models.consistency.capsule.decision import Case, Decision, Judged
from nrl_models.consistency.capsule.diverging_block import block_name
from nrl_models.consistency.capsule.package_versions import versions
from nrl_models.consistency.capsule.replay import Replay, compared
from nrl_models.consistency.capsule.trainer_tensors import (
    add_block,
    add_comparison,
    add_layers,
    add_observations,
    add_routes,
    add_trainer_layers,
    read_observations,
    recomputed,
    weight_digests,
)
from nrl_models.consistency.verdict import Party
from nrl_models.engines.base import Engine
from nrl_models.engines.hf import HFEngine
from nrl_models.logprobs.metrics import consistency_metrics, shown_error
from nrl_models.logprobs.sampling import Sampling
from nrl_models.quirks import VerdictKind


def write_consistency(file: Path, judged: Judged, engine: Engine, trainer: HFEngine, limits: Limits) -> Contents:
    """Write a capsule.

    Args:
        file: The file.
        judged: The judged cell. Its comparisons of modules should have tensors.
        engine, trainer: The running sides.
        limits: Size of the capsule.

    Raises:
        SaveError: If the disk is full or read-only.
    """
    title, case, observed, verdict = judged
    contents = Contents(CapsuleKind.CONSISTENCY, limits)
    mask = torch.zeros(case.tokens.shape, dtype=torch.bool)
    mask[:, -case.generated :] = True
    contents.add({"tokens": case.tokens.int(), "mask": mask})
    contents.add({f"logprobs/{party}": values for party, values in case.parties.items()})
    contents.values = {
        "title": f"{title}: trainer ({_shown(trainer)}) against {engine.name} ({_shown(engine)})",
        "case": _case_values(case),
        "comparisons": {},
        "metrics": _metrics(case),
        "verdict": verdict.to_json(),
        "versions": versions(),
        "engine": engine.describe() | {"version of the weights": engine.version},
        "trainer": trainer.describe(),
        "digests": weight_digests(trainer.model),
    }
    add_observations(contents, observed)
    module = "" if verdict.divergence is None else verdict.divergence.module
    first = case.tokens[0].tolist()
    compared_lengths = [int(name.rpartition(".")[2]) for name in observed.comparisons] or [len(first)]
    block = block_name(trainer.model, module) if module else ""
    add_routes(contents, trainer.model, engine, case.tokens)
    add_block(contents, trainer.model, module, first[: compared_lengths[-1]])
    for name, comparison in observed.comparisons.items():
        is_last = int(name.rpartition(".")[2]) == compared_lengths[-1]
        add_comparison(contents, name, comparison, module if is_last else "", block)
    add_trainer_layers(contents, trainer.model, first)
    for name, comparison in observed.comparisons.items():
        if name.startswith("modules.engine."):
            add_layers(contents, "engine", comparison.actual)
    contents.write(file)
    return contents


def replay_consistency(contents: Contents) -> Replay:
    """Compute the verdict of a capsule again.

    Raises:
        CapsuleError, KeyError, ...: If the capsule is damaged.
    """
    values = contents.values
    case = _read_case(contents)
    observed = read_observations(contents)
    verdict = Decision(case, observed).verdict()
    if verdict.kind is VerdictKind.ROUNDING and values["verdict"]["kind"] == VerdictKind.PRECISION:
        verdict = replace(verdict, kind=VerdictKind.PRECISION)  # version 0.1.0 did not distinguish the two
    metrics = _metrics(case)
    errors = {party: each["token_mult_prob_error"] for party, each in metrics.items()}
    shown = ", ".join(f"{'NaN' if error is None else shown_error(error)} of {party}" for party, error in errors.items())
    checks = [compared("metrics", values["metrics"], metrics, f"token_mult_prob_error {shown}")]
    checks += recomputed(contents, observed)
    prose = ("summary", "message", "detail")
    checks.append(compared("verdict", values["verdict"], verdict.to_json(), str(verdict.kind), prose))
    return Replay(
        kind=contents.kind,
        title=values["title"],
        verdict=verdict.to_json(),
        summary=verdict.summary,
        checks=tuple(checks),
        left_out=tuple(contents.left_out),
        versions=values["versions"],
    )


def _metrics(case: Case) -> dict[str, dict[str, Any]]:
    """Compare the trainer's log-probabilities with those of each other side."""
    trainer = case.parties[Party.TRAINER]
    return {
        str(party): consistency_metrics(trainer, values).to_json()
        for party, values in case.parties.items()
        if party != Party.TRAINER
    }


def _shown(engine: Engine) -> str:
    dtype = engine.capabilities().dtype
    return "precision unknown" if dtype is None else dtype_name(dtype)


def _case_values(case: Case) -> dict[str, Any]:
    return {
        "sampling": asdict(case.sampling),
        "dtypes": {party: None if dtype is None else dtype_name(dtype) for party, dtype in case.dtypes.items()},
        "threshold": case.threshold,
        "random_weights": case.random_weights,
        "quirks": list(case.quirks),
        "witness": case.witness,
        "is_alternative": case.is_alternative,
    }


def _read_case(contents: Contents) -> Case:
    values, tensors = contents.values["case"], contents.tensors
    dtypes = {Party(party): None if name is None else getattr(torch, name) for party, name in values["dtypes"].items()}
    return Case(
        tokens=tensors["tokens"].long(),
        generated=int(tensors["mask"][0].sum()),
        sampling=Sampling(**values["sampling"]),
        parties={party: tensors[f"logprobs/{party}"] for party in dtypes},
        dtypes=dtypes,
        threshold=values["threshold"],
        random_weights=values["random_weights"],
        quirks=tuple(values["quirks"]),
        witness=values["witness"],
        is_alternative=values["is_alternative"],
    )
