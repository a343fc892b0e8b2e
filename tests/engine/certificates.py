"""Certificates of the engine sweeps: one JSON file per architecture and engine, next to the coverage pages."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch

from nrl_models.certify import Certificate, CheckResult, Status
from nrl_models.certify.certified import Options, file_hashes, hardware
from nrl_models.certify.check_result import answer_of
from nrl_models.certify.with_engine import REFITS
from nrl_models.consistency.capsule.package_versions import versions
from nrl_models.consistency.cells import THRESHOLD, is_conclusive
from nrl_models.parity.parity_report import Unit
from tests.engine.coverage_page import ORDER
from tools.coverage_pages.engine_outcomes import certificate_file

NOT_COVERED = (
    "published weights: the model is tiny, and its weights are random with seed 0",
    "behavior on a GPU",
)

OTHER_CHECKS = CheckResult(
    name="other checks",
    status=Status.LEFT_OUT,
    summary="not part of the sweep",
    advice="Run `nrl-models certify` on the published checkpoint.",
)
"""Stands for the checks of `nrl-models certify` that sweeps do not run. The answer is at best "not decided"."""


class SweepOutcome(Protocol):
    """Attributes that outcomes of text and of images share."""

    @property
    def architecture(self) -> str: ...
    @property
    def status(self) -> str: ...
    @property
    def refitted(self) -> float | None: ...
    @property
    def bounds(self) -> tuple[float, ...]: ...
    @property
    def reason(self) -> str: ...
    @property
    def dtype(self) -> str: ...


def write_certificate(section: str, engine: str, outcome: SweepOutcome, checkpoint: Path) -> None:
    """Write the certificate of an outcome, or delete an earlier one if the architecture was not run.

    Args:
        section: A key of `engine_outcomes.ENGINES`.
        engine: Name of the engine for `nrl-models certify --engine`.
        outcome: The outcome.
        checkpoint: Directory of the tiny model.
    """
    file = certificate_file(section, outcome.architecture)
    if outcome.status == ORDER[-1]:
        file.unlink(missing_ok=True)
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    certificate_of(engine, outcome, checkpoint).save(file)


def certificate_of(engine: str, outcome: SweepOutcome, checkpoint: Path) -> Certificate:
    """Return the certificate of an outcome. Arguments are those of `write_certificate`."""
    engine_options = getattr(outcome, "options", {})
    options = Options(engine, engine_options, getattr(torch, outcome.dtype))
    results = (*results_of(outcome), OTHER_CHECKS)
    return Certificate.of(
        name=f"tiny {outcome.architecture}",
        answer=answer_of(results),
        files=file_hashes(checkpoint),
        options=options.to_json(),
        versions=versions(),
        hardware=hardware(),
        results=results,
        not_covered=NOT_COVERED,
    )


def results_of(outcome: SweepOutcome) -> Iterator[CheckResult]:
    """Yield the results of the checks that an outcome consists of."""
    agrees = outcome.status in ("agrees", "not decided")
    has_steps = hasattr(outcome, "stepped")  # text; images have one refit
    names = REFITS if has_steps else ("images",)
    values = (outcome.refitted, getattr(outcome, "stepped", None))
    measured = len(outcome.bounds)
    for index, name in enumerate(names):
        if index >= measured:
            summary = outcome.reason if index == 0 else "not reached: the first refit failed"
            yield CheckResult(name=name, status=Status.NOT_DECIDED, summary=summary)
            continue
        passed = agrees or index < measured - 1
        value, bound = values[index], outcome.bounds[index]
        number = "not finite" if value is None else f"{value:.7g}"
        yield CheckResult(
            name=name,
            status=_status(passed, value),
            summary=f"token_mult_prob_error {number}" + ("" if passed else f"; {outcome.reason}"),
            value=value,
            bound=min(bound, THRESHOLD),
            unit=Unit.TOKEN_MULT_PROB_ERROR,
        )
    if (loaded := getattr(outcome, "loaded", None)) is not None:
        yield CheckResult(
            name="log-probabilities",
            status=_status(outcome.status in ("agrees as loaded", "not decided"), loaded),
            summary=f"token_mult_prob_error {loaded:.7g} with the weights read from files",
            value=loaded,
            unit=Unit.TOKEN_MULT_PROB_ERROR,
        )


def _status(passed: bool, value: float | None) -> Status:
    """Return the status of a measured error that is within its bound, or not."""
    if not passed or value is None:
        return Status.FAILED
    return Status.PASSED if is_conclusive(value) else Status.NOT_DECIDED
