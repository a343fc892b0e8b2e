"""Commands that compare a checkpoint with transformers and with an inference engine."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal

import typer

from nrl_models.cli.arguments import (
    BOUNDS,
    DEVICE,
    ENGINE,
    INPUT,
    CheckpointPath,
    Device,
    Dtype,
    EngineName,
    EngineOptions,
    IgnoredConfigKeys,
    JsonFile,
    TrainerDtype,
    Verbose,
    check_device,
    integer,
    number,
    torch_dtype,
)
from nrl_models.cli.console import show, show_checks, show_report, status


class ParityCheck(StrEnum):
    """A comparison of `parity`."""

    LEVEL_1 = "1"
    LEVEL_2 = "2"
    LEVEL_3 = "3"
    GRADIENTS = "gradients"


def parity(
    path: CheckpointPath,
    check: Annotated[
        list[ParityCheck] | None,
        typer.Option(
            metavar="CHECK", help="1 (weights), 2 (layers), 3 (logits) or gradients. Repeatable. \\[default: all]"
        ),
    ] = None,
    device: Annotated[str, typer.Option(metavar=DEVICE, help="Device to run on.")] = "cpu",
    length: Annotated[int, integer("Sequence length in tokens.", least=8)] = 64,
    batch: Annotated[int, integer("Batch size.", least=2)] = 2,
    seed: Annotated[int, integer("Random seed for the inputs.")] = 42,
    second_trainer: Annotated[
        Literal["megatron"] | None,
        typer.Option(
            metavar="NAME",
            help="Also compare nrl_models' model with the same model in another framework. Supported: megatron "
            "(Megatron-Core).",
        ),
    ] = None,
    ignore_config_key: IgnoredConfigKeys = None,
    verbose: Verbose = False,
    json_file: JsonFile = None,
) -> None:
    """Load a checkpoint with nrl_models and with transformers, compare the models, and name the first difference.

    Compares weights (level 1), layers (level 2), logits (level 3) and gradients.
    """
    from nrl_models.parity import check_parity
    from nrl_models.parity.check import CHECKS

    check_device(device)
    if second_trainer is not None:
        from nrl_models.engines.processes.megatron_core import MegatronEngine

        MegatronEngine.require_installed()  # before anything is loaded
    report = check_parity(path, checks=check or CHECKS, device=device, length=length, batch=batch, seed=seed)
    if second_trainer is not None:
        from nrl_models.megatron.trainer_parity import check_megatron

        report.add(check_megatron(path, checks=check or CHECKS, length=length, batch=batch, seed=seed))
    show_checks(report, json_file, verbose=verbose)
    if not report.passed:
        raise typer.Exit(1)


def refit_check(
    path: CheckpointPath,
    engine: EngineName = "vllm",
    dtype: Dtype = None,
    trainer_dtype: TrainerDtype = None,
    device: Device = "cpu",
    length: Annotated[
        int | None,
        integer(
            "Length of the compared sequences. \\[default: 100, or the model's maximum if it is shorter]",
            panel=INPUT,
            least=8,
        ),
    ] = None,
    batch: Annotated[int, integer("Number of compared sequences.", panel=INPUT, least=1)] = 4,
    threshold: Annotated[
        float,
        number(
            "A transfer passes if its token_mult_prob_error is at most a bound. The bound of the first transfer "
            "depends on the dtype, that of the second on the error of the first. No bound is larger than FLOAT. "
            "token_mult_prob_error is the mean over tokens of (larger probability / smaller probability); the two "
            "probabilities are the trainer's and the engine's.",
            panel=BOUNDS,
        ),
    ] = 1.05,
    bucket_mb: Annotated[
        float | None,
        number(
            "Send the weights in buckets of at most this many MB. \\[default: all tensors at once]",
            panel=ENGINE,
            least=1e-6,
            most=1e9,
        ),
    ] = None,
    engine_option: EngineOptions = None,
    ignore_config_key: IgnoredConfigKeys = None,
    json_file: JsonFile = None,
) -> None:
    """Check that new weights reach an engine.

    Starts an engine with random weights (or uses a running server), sends it the model's weights, trains one step, and
    sends the new weights. Compares log-probabilities after each transfer.
    """
    from nrl_models.consistency.refit import check_refit, refit_settings

    check_device(device)
    with status("checking the settings") as note:
        check = check_refit(
            path,
            engine=engine,
            dtype=torch_dtype(dtype),
            trainer_dtype=torch_dtype(trainer_dtype),
            device=device,
            settings=refit_settings(path, engine, length, batch, threshold),
            bucket_bytes=None if bucket_mb is None else int(bucket_mb * 1e6),
            engine_options=dict(engine_option or ()),
            note=note,
        )
    show(check.summary)
    for step in check.steps:
        for problem in (*step.problems, *step.result.problems, *step.result.notes):
            show(f"{step.name}: {problem}")
        if step.result.verdict:
            show(f"{step.name}: {step.result.verdict.summary}")
    show_report(check, json_file)
