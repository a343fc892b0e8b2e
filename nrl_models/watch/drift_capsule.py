"""Write the capsule of a failing sync or step, and replay it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.utils.rnn import pad_sequence

from nrl_models.common.checkpoint.json_reading import parsed
from nrl_models.common.checkpoint.writing import path_to_write
from nrl_models.common.logs import get_logger
from nrl_models.common.modules import innermost
from nrl_models.consistency.capsule.capsule_file import MEGABYTE, CapsuleKind, Contents, Limits
from nrl_models.consistency.capsule.diverging_block import block_name
from nrl_models.consistency.capsule.package_versions import versions
from nrl_models.consistency.capsule.replay import (
    Replay,
    compared,
    measured_or_note,
)
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
from nrl_models.engines.engine_types import Sample
from nrl_models.errors import UnknownArgumentError, shown
from nrl_models.logprobs.metrics import shown_error
from nrl_models.logprobs.microbatches import ranks_of
from nrl_models.watch.diagnosis import DriftEvidence
from nrl_models.watch.event import Event, evidence_from_json, evidence_to_json
from nrl_models.watch.finding import Finding
from nrl_models.watch.measured import MODULES, Measured, Running
from nrl_models.watch.rollout_tensors import RolloutStep
from nrl_models.watch.step_metrics import step_metrics

logger = get_logger(__name__)

MOST_FILES = 8
"""Maximum number of capsules that a watch writes to a directory."""

SHARE = 0.25
"""Share of a capsule's size for the log-probabilities of a step."""

SUFFIX = ".safetensors"


class CapsuleWriter:
    """Writes the capsules of a watch.

    Args:
        target: a file for the first failure, or a directory for one file per failure, at most `MOST_FILES`. A path
            without a suffix is a directory. With several ranks, names of files end in the rank.
        limits: size of a capsule. Default: `Limits()`.

    Attributes:
        target: the path with `~` expanded.
        written: number of files so far.

    Raises:
        UnknownArgumentError: an argument has another type, or no file can have that path.
    """

    def __init__(self, target: str | Path, limits: Limits | None = None) -> None:
        if limits is not None and not isinstance(limits, Limits):
            raise UnknownArgumentError(f"capsule_limits={shown(limits)}: expected Limits: call Limits(megabytes=...)")
        self.target, self.limits = path_to_write("capsule", target), limits or Limits()
        self.written: list[Path] = []

    def write(
        self,
        event: Event,
        evidence: DriftEvidence,
        findings: Sequence[Finding],
        number: int,
        step: RolloutStep | None = None,
    ) -> None:
        """Write a capsule of an event with failures.

        Args:
            event, evidence: the event.
            findings: its findings.
            number: number of the step.
            step: rollouts of the step; None for a sync.
        """
        is_folder = self.target.is_dir() or not self.target.suffix
        if len(self.written) >= (MOST_FILES if is_folder else 1):
            return
        version = evidence.sync.version
        name = f"{event.kind}-{number}-version-{version}-{len(self.written) + 1}{SUFFIX}"
        file = self.target / name if is_folder else self.target
        if ranks_of(None) > 1:
            file = file.with_stem(f"{file.stem}-rank-{dist.get_rank()}")
        file.parent.mkdir(parents=True, exist_ok=True)
        contents = _contents(self.limits, event, evidence, findings, f"{event.kind} {number}, version {version}", step)
        contents.write(file)
        self.written.append(file)
        size = file.stat().st_size / MEGABYTE
        logger.warning(f"capsule: {file} ({size:.1f} MB). To compute its findings again: nrl-models replay {file}")


def _contents(
    limits: Limits,
    event: Event,
    evidence: DriftEvidence,
    findings: Sequence[Finding],
    title: str,
    step: RolloutStep | None,
) -> Contents:
    contents, observed, running = (
        Contents(CapsuleKind.WATCH, limits),
        evidence.measured.observed,
        evidence.measured.sides,
    )
    contents.values = {
        "title": title,
        "event": event.to_json(),
        "evidence": evidence_to_json(evidence),
        "findings": [finding.to_json() for finding in findings],
        "comparisons": {},
        "routes": {},
        "versions": versions(),
        "engine": None if running.engine is None else running.engine.describe(),
        "digests": {},
        "rows": None,
        "block": None,
    }
    add_observations(contents, observed)
    for name, values in (("replies/trainer", evidence.trainer), ("replies/engine", evidence.engine)):
        if values is not None:
            contents.add({name: values})
    if running.samples:
        contents.add(_tokens(running.samples))
    if step is not None:
        _add_rows(contents, step)
    if running.model is not None:
        alone = ranks_of(None) == 1  # only failing ranks write a capsule, and a sharded model needs all of them
        digests = dict(evidence.sync.sent)
        if alone and not digests:
            digests = measured_or_note(lambda: weight_digests(running.model))[0]
        contents.values["digests"] = digests
        if alone:
            _add_model(contents, running, evidence)
    return contents


def _tokens(samples: Sequence[Sample]) -> dict[str, torch.Tensor]:
    """Return token ids of samples, padded with -1; a mask of sampled tokens; and experts that the engine reports."""
    rows = [torch.tensor(sample.sequence, dtype=torch.int32) for sample in samples]
    masks = [torch.arange(len(row)) >= len(sample.prompt) for row, sample in zip(rows, samples, strict=True)]
    routed = {
        f"routes/sample {index}": torch.as_tensor(sample.routed_experts).short()
        for index, sample in enumerate(samples)
        if sample.routed_experts is not None
    }
    return {
        "tokens": pad_sequence(rows, batch_first=True, padding_value=-1),
        "sampled": pad_sequence(masks, batch_first=True, padding_value=False),
        **routed,
    }


def _add_rows(contents: Contents, step: RolloutStep) -> None:
    """Add the log-probabilities of as many rows as fit, those with the largest differences first."""
    trainer, engine = step.trainer.detach().double().cpu(), step.engine.detach().double().cpu()
    mask = step.mask.detach().bool().cpu()
    difference = ((trainer - engine).abs().nan_to_num(nan=torch.inf) * mask).nan_to_num(nan=0.0).amax(1)
    most = int(contents.limits.megabytes * MEGABYTE * SHARE // max(1, 17 * trainer.shape[1]))
    order = difference.argsort(descending=True)[: max(1, most)].sort().values
    if len(order) < len(trainer):
        contents.left_out.append(f"log-probabilities of {len(trainer) - len(order)} of {len(trainer)} rows")
    tensors = {"trainer": trainer[order], "engine": engine[order], "mask": mask[order]}
    if step.attention_mask is not None:
        tensors["attention"] = step.attention_mask.detach().bool().cpu()[order]
    contents.add({f"rows/{name}": tensor for name, tensor in tensors.items()})
    metrics = step_metrics(tensors["trainer"], tensors["engine"], tensors["mask"], tensors.get("attention"))
    contents.values["rows"] = {"count": len(order), "of": len(trainer), "metrics": metrics.values()}


def _add_model(contents: Contents, running: Running, evidence: DriftEvidence) -> None:
    """Add activations, the first diverging block and routes, if the trainer's model can run alone."""
    model: Any = innermost(running.model)
    comparison = evidence.measured.observed.comparisons.get(MODULES)
    divergence = None if comparison is None else comparison.divergence()
    module = "" if divergence is None else divergence.module
    if running.probes is not None:
        tokens = running.probes.tokens
        contents.add({"probes": tokens.int()})
    elif running.samples:
        tokens = torch.tensor([running.samples[0].sequence])
    else:
        return  # the samples have no token ids
    add_routes(contents, model, running.engine, tokens)
    first = tokens[0].tolist()
    add_block(contents, model, module, first)
    if comparison is not None:
        add_comparison(contents, MODULES, comparison, module, block_name(model, module) if module else "")
    add_trainer_layers(contents, model, first)
    if comparison is not None:
        add_layers(contents, "engine", comparison.actual)


def replay_watch(contents: Contents) -> Replay:
    """Compute the findings of a capsule again.

    Raises:
        CapsuleError, KeyError, ...: if the capsule is damaged.
    """
    values, tensors = contents.values, contents.tensors
    event: Event = parsed(Event, values["event"])
    observed = read_observations(contents)
    evidence = evidence_from_json(
        values["evidence"],
        measured=Measured(observed=observed),
        trainer=tensors.get("replies/trainer"),
        engine=tensors.get("replies/engine"),
    )
    checks = []
    if (rows := values["rows"]) is not None:
        sides = tensors["rows/trainer"], tensors["rows/engine"]
        metrics = step_metrics(*sides, tensors["rows/mask"], tensors.get("rows/attention"))
        error = shown_error(metrics.token_mult_prob_error)
        detail = f"token_mult_prob_error {error} of {rows['count']} of {rows['of']} rows"
        checks.append(compared("metrics", rows["metrics"], metrics.values(), detail))
        if rows["count"] == rows["of"]:
            evidence = replace(evidence, metrics=metrics)
    findings = event.findings(evidence)
    checks += recomputed(contents, observed)
    again = [finding.to_json() for finding in findings]
    causes = ", ".join(f"{finding.level}: {finding.cause}" for finding in findings)
    checks.append(compared("findings", values["findings"], again, causes, ("message", "advice")))
    return Replay(
        kind=contents.kind,
        title=values["title"],
        verdict={"findings": again},
        summary="\n".join(map(str, findings)),
        checks=tuple(checks),
        left_out=tuple(contents.left_out),
        versions=values["versions"],
    )
