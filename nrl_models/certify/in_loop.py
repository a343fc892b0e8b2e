"""Controls of a training loop: steps at learning rate 0 must change nothing, and a second sync must arrive.

The loop takes two steps at learning rate 0, then one at `LEARNING_RATE`, and sends the weights to an engine before the
first step and after each. With a mesh it runs in one process per rank, over gloo on a CPU, and the first rank sends the
gathered weights to transformers.
"""

from __future__ import annotations

import json
import math
import pickle
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import ProcessException

from nrl_models.auto import auto_class_for
from nrl_models.certify.certified import CheckpointUnderTest
from nrl_models.certify.check_result import CheckResult, Side, token_error
from nrl_models.common.checkpoint.writing import write_whole
from nrl_models.common.forward.evaluation import evaluating
from nrl_models.consistency.cells import THRESHOLD
from nrl_models.engines.base import Engine
from nrl_models.engines.digests import digested, refit_problems
from nrl_models.engines.hf import HFEngine
from nrl_models.errors import ConsistencyError, NRLModelsError, UnknownArgumentError, listed
from nrl_models.family import FamilyModel
from nrl_models.inputs.model_inputs import inputs_for, text_ids
from nrl_models.logprobs import token_logprobs
from nrl_models.logprobs.metrics import shown_error, token_mult_prob_error
from nrl_models.logprobs.sampling import Sampling
from nrl_models.parity.noise import limit, logits_noise
from nrl_models.parity.parity_report import Unit
from nrl_models.parity.worst import worst_of

ZERO, SECOND = "learning rate 0", "second sync"
NAMES = (ZERO, SECOND)
"""Names of the checks."""

LEARNING_RATE = 1e-2
BATCH, LENGTH = 4, 48
RATES = (0.0, 0.0, LEARNING_RATE)
PATIENCE = timedelta(minutes=5)

ERROR = "error.pickle"
"""File in which a rank leaves its error for the parent process."""


@dataclass
class Controls:
    """Measurements of the loop.

    Args:
        tokens: number of tokens with a ratio.
        ratio: largest distance from 1 of a token's ratio of new and old probability, in each step.
        changed: for each sync after the first, names of tensors whose digest differs from that of the sync before.
        problems: for each sync, tensors that did not arrive or were not written.
        error: for each sync, `token_mult_prob_error` between the engine and the trainer.
        sent: number of tensors in each sync.
    """

    tokens: int = 0
    ratio: list[float] = field(default_factory=list)
    changed: list[list[str]] = field(default_factory=list)
    problems: list[list[str]] = field(default_factory=list)
    error: list[float] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)


def require_loop(mesh: Mapping[str, int] | None, only: Collection[str]) -> None:
    """Raise if the loop cannot run over `mesh`, or if a check of the loop is selected and no loop is requested.

    Raises:
        UnknownArgumentError: See above.
    """
    if mesh is not None and mesh.get("pp", 1) > 1:
        raise UnknownArgumentError(
            f"--in-loop (loop_mesh): pp={mesh['pp']}, expected some of fsdp, ep and tp: the loop has no pipeline stages"
        )
    if mesh is None and (selected := [name for name in NAMES if name in only]):
        raise UnknownArgumentError(
            f"--only (only): {', '.join(selected)} needs a training loop: pass --in-loop as well, e.g. --in-loop none"
        )


def controls(subject: CheckpointUnderTest) -> Iterator[CheckResult]:
    """Run the loop, and check ratios, digests and syncs."""
    options = subject.options
    mesh = dict(options.in_loop or {})
    inputs = inputs_for(subject.model, length=LENGTH, batch=2, images=False, seed=options.seed)
    bound = math.expm1(2 * limit(logits_noise(subject.model, inputs), options.dtype or torch.float32))
    subject.release_model()
    ranks = math.prod(mesh.values())
    if ranks == 1:
        engine = (
            HFEngine.start(subject.folder, dtype=options.dtype) if options.engine is None else subject.start_engine()
        )
        with engine:
            measurements = run_loop(subject.folder, options.dtype, options.device, options.seed, engine=engine)
    else:
        measurements = _in_processes(subject, mesh, ranks)
    where = " over " + ", ".join(f"{name}={size}" for name, size in mesh.items()) if mesh else ""
    yield _at_zero(measurements, bound, where)
    yield _second_sync(measurements, where)


def _at_zero(measurements: Controls, bound: float, where: str) -> CheckResult:
    ratio = worst_of(measurements.ratio, default=0.0)
    changed = sorted({name for names in measurements.changed[:-1] for name in names})
    problems = [] if ratio <= bound else [f"ratios of new and old probability differ from 1 by up to {ratio:.2e}"]
    problems += [f"{len(changed)} exported tensors changed: {listed(changed)}"] if changed else []
    return CheckResult.of(
        ZERO,
        problems,
        f"ratios of new and old probability differ from 1 by up to {ratio:.2e}; digests unchanged{where}",
        value=ratio,
        bound=bound,
        unit=Unit.MAX_DIFF,
        compared=measurements.tokens if all(measurements.sent) else 0,
        side=Side.MODEL,
        advice="Dropout, sharding or the export changes the model during training.",
    )


def _second_sync(measurements: Controls, where: str) -> CheckResult:
    problems = [f"sync {number + 1}: {text}" for number, texts in enumerate(measurements.problems) for text in texts]
    worst = worst_of(measurements.error, default=math.inf)
    if measurements.error and not worst <= THRESHOLD:
        number = measurements.error.index(worst) + 1
        problems.append(f"sync {number}: token_mult_prob_error {shown_error(worst)} between engine and trainer")
    if measurements.changed and not measurements.changed[-1]:
        problems.append("no exported tensor changed after a step with a learning rate above 0")
    return CheckResult.of(
        SECOND,
        problems,
        f"{len(measurements.error)} syncs arrived; token_mult_prob_error at most {shown_error(worst)}{where}",
        **token_error(worst if measurements.error else None, THRESHOLD),
        compared=sum(measurements.sent) if measurements.error and all(measurements.sent) else 0,
        side=Side.ENGINE,
        advice="Weights do not reach the engine as the trainer has them.",
    )


def run_loop(
    folder: Path,
    dtype: torch.dtype | None,
    device: str,
    seed: int,
    *,
    engine: Engine | None,
    mesh: Any = None,
) -> Controls:
    """Train and sync. Returns the measurements.

    Args:
        folder: the checkpoint.
        dtype: dtype of the trainer; None for the checkpoint's.
        device: device of the trainer.
        seed: random seed of the tokens.
        engine: receives the weights; None on all ranks but the first.
        mesh: mesh of the trainer; None for one process.
    """
    sharded = {"mesh": mesh} if mesh is not None else {"device": device}
    model: FamilyModel = auto_class_for(folder).from_pretrained(folder, dtype=dtype or "auto", **sharded)
    model.train()
    generator = torch.Generator().manual_seed(seed)
    tokens = text_ids(model.config, (BATCH, LENGTH), generator).to(model.device)
    advantages = torch.randn(BATCH, 1, generator=generator).to(model.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    measurements = Controls(tokens=tokens[:, 1:].numel())
    before = _sync(model, engine, tokens, measurements, {})
    for rate in RATES:
        optimizer.param_groups[0]["lr"] = rate
        with torch.no_grad(), evaluating(model):
            old = token_logprobs(model, tokens).logprobs[:, 1:]
        ratio = (token_logprobs(model, tokens).logprobs[:, 1:] - old).exp()
        (-(ratio * advantages).mean()).backward()
        if rate == 0.0:
            measurements.ratio.append((ratio.detach() - 1).abs().max().item())
        optimizer.step()
        optimizer.zero_grad()
        before = _sync(model, engine, tokens, measurements, before)
    return measurements


def _sync(
    model: FamilyModel, engine: Engine | None, tokens: torch.Tensor, measurements: Controls, before: Mapping[str, str]
) -> dict[str, str]:
    """Send the weights to the engine, and compare. Returns the digest of each tensor. All ranks call it."""
    adapter, sent = model.state_dict_adapter, dict[str, str]()
    stream = digested(adapter.iter_export(model), sent)
    if engine is None:
        for _ in stream:
            pass
    else:
        report = engine.refit(stream, partial=True)
        measurements.problems.append(refit_problems(report, sent, adapter.export_plan()))
    measurements.sent.append(len(sent))
    if before:
        measurements.changed.append([name for name, digest in sent.items() if before.get(name) != digest])
    with torch.no_grad(), evaluating(model):
        ours = token_logprobs(model, tokens).logprobs[:, 1:].double().cpu()
    if engine is not None:
        theirs = torch.tensor(engine.score(tokens.tolist(), Sampling()), dtype=torch.float64)[:, 1:]
        measurements.error.append(token_mult_prob_error(ours, theirs))
    return sent


def _in_processes(subject: CheckpointUnderTest, mesh: Mapping[str, int], ranks: int) -> Controls:
    """Run the loop in one process per rank. Returns the first rank's measurements.

    Raises:
        NRLModelsError: If a rank raised it.
        ConsistencyError: If a rank raised another error, or was killed.
    """
    options = subject.options
    with tempfile.TemporaryDirectory() as folder:
        try:
            torch.multiprocessing.spawn(
                _rank, (ranks, folder, subject.folder, dict(mesh), options.dtype, options.seed), nprocs=ranks
            )
        except ProcessException as error:
            if (raised := Path(folder) / ERROR).exists():
                raise pickle.loads(raised.read_bytes()) from error
            last = str(error).strip().splitlines()[-1]
            raise ConsistencyError(f"rank {error.error_index} of {ranks} ended early: {last}") from error
        return Controls(**json.loads((Path(folder) / "controls.json").read_text()))


def _rank(
    rank: int, ranks: int, out: str, folder: Path, mesh: dict[str, int], dtype: torch.dtype | None, seed: int
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=rank, world_size=ranks, timeout=PATIENCE)
    devices = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
    try:
        with HFEngine.start(folder, dtype=dtype) if rank == 0 else nullcontext() as engine:
            measurements = run_loop(folder, dtype, "cpu", seed, engine=engine, mesh=devices)
    except NRLModelsError as error:
        write_whole(Path(out) / ERROR, pickle.dumps(error))
        raise
    if rank == 0:
        (Path(out) / "controls.json").write_text(json.dumps(asdict(measurements)))
    dist.destroy_process_group()
