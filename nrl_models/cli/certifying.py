"""The command `certify`."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from nrl_models.cli.arguments import (
    ENGINE,
    OUTPUT,
    CheckpointPath,
    Device,
    EngineOptions,
    IgnoredConfigKeys,
    JsonFile,
    OptionalEngineName,
    check_device,
    dtype_argument,
    input_file,
    integer,
    mesh_sizes,
    output_file,
    output_folder,
    require_only,
    torch_dtype,
)
from nrl_models.cli.console import show, status, write_json
from nrl_models.errors import did_you_mean

if TYPE_CHECKING:
    from nrl_models.certify import Certificate

UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}

REPORT = "report.html"

CHECK_NAMES = (
    *("files", "tokenizer", "values", "embeddings", "padding", "packing", "saved files", "draft layers"),
    *("router replay", "sharding", "weights", "layers", "logits", "gradients", "engine start", "routed experts"),
    *("images", "prefix caching", "longest length", "LoRA merged into weights", "LoRA served by the engine"),
    *("refit from random weights", "refit after a training step", "log-probabilities", "decode against prefill"),
    *("learning rate 0", "second sync"),
)
"""Names of all checks, for the help text. `nrl_models.certify.all_checks.NAMES` needs torch."""

APPLIES_TO_VERIFY = ("path", "verify", "engine", "full", "length", "public_key", "ignore_config_key", "json_file")
"""Parameters that have an effect with `--verify`."""

NOT_DECIDED = 3
"""Exit status of the answer "not decided"."""


def duration(text: str) -> float:
    """Parse a duration such as `10m`. Returns seconds."""
    if not re.fullmatch(r"\d+(\.\d+)?[smh]", text):
        raise typer.BadParameter(f"{text!r}: expected a duration such as 90s, 10m or 1h")
    return float(text[:-1]) * UNITS[text[-1]]


def check_name(text: str) -> str:
    """Parse the name of a check."""
    if text not in CHECK_NAMES:
        raise typer.BadParameter(f"{text!r}{did_you_mean(text, CHECK_NAMES)}: expected one of {', '.join(CHECK_NAMES)}")
    return text


def certify(
    context: typer.Context,
    path: CheckpointPath,
    engine: OptionalEngineName = None,
    dtype: Annotated[
        str | None, dtype_argument("Compute dtype of engine and trainer. \\[default: the checkpoint's]", panel=ENGINE)
    ] = None,
    engine_option: EngineOptions = None,
    device: Device = "cpu",
    budget: Annotated[
        float | None,
        typer.Option(
            parser=duration,
            metavar="TIME",
            help="Time for all checks, e.g. 10m. Checks that are not expected to finish in time are left out. In this "
            "case, the answer cannot be 'ready'. \\[default: no limit]",
        ),
    ] = None,
    full: Annotated[
        bool,
        typer.Option(
            "--full",
            help="Compare log-probabilities in all 36 cells of NeMo RL's guide (combinations of length, batch size, "
            "prompts and decoding) instead of 8. Takes hours.",
        ),
    ] = False,
    only: Annotated[
        list[str] | None,
        typer.Option(
            parser=check_name,
            metavar="CHECK",
            help="Run only this check, and those that share a computation with it. Repeatable. Checks that do not run "
            "keep their results from an earlier run with the same --out. Without an earlier run, the answer cannot be "
            "'ready'. Names (docs/certify.md explains them; quote those with spaces): "
            f"{', '.join(CHECK_NAMES[:-2])}. The last two run only with --in-loop: {', '.join(CHECK_NAMES[-2:])}.",
        ),
    ] = None,
    skip: Annotated[
        list[str] | None,
        typer.Option(
            parser=check_name,
            metavar="CHECK",
            help="Skip this check, and those that share a computation with it. Repeatable. For the names, see --only.",
        ),
    ] = None,
    seed: Annotated[int, integer("Random seed for inputs.")] = 0,
    verify: Annotated[
        Path | None,
        input_file(
            "Run no checks: verify that this certificate is unchanged and was made for PATH.", metavar="CERTIFICATE"
        ),
    ] = None,
    public_key: Annotated[
        Path | None, input_file("With --verify: require a signature by this public key (PEM).")
    ] = None,
    length: Annotated[
        int,
        integer(
            "With --verify: require that the longest sequence on which trainer and engine agree has at least INT "
            "tokens.",
            least=0,
        ),
    ] = 0,
    sign: Annotated[
        Path | None,
        input_file("Sign the certificate with this Ed25519 key (PEM). Writes certificate.json.sig.", panel=OUTPUT),
    ] = None,
    in_loop: Annotated[
        str | None,
        typer.Option(
            metavar="MESH",
            help="Also train three steps with learning rates 0, 0 and 0.01, and send the weights to the engine after "
            "each step. All weights must arrive, and only the last step may change them. MESH is, for example, fsdp=2 "
            "or fsdp=2,tp=2, or 'none' to train in one process. \\[default: do not train]",
            callback=lambda text: text if text in (None, "none") else mesh_sizes(text),
        ),
    ] = None,
    layers: Annotated[
        int | None,
        integer(
            "Run the checks on a model with only the first INT layers, for models that do not fit in memory. The "
            "certificate records INT. \\[default: all]",
            least=1,
        ),
    ] = None,
    ignore_config_key: IgnoredConfigKeys = None,
    out: Annotated[
        Path | None,
        output_folder(
            "Directory for results, certificate.json and report.html. \\[default: certify/MODEL-DIGEST, with the "
            "name of PATH and a hash]",
            panel=OUTPUT,
        ),
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Discard earlier results.", rich_help_panel=OUTPUT)] = False,
    json_file: JsonFile = None,
    markdown: Annotated[Path | None, output_file("Write the result as Markdown for a model card.")] = None,
    badge: Annotated[Path | None, output_file("Write an SVG badge.")] = None,
) -> None:
    """Run all checks on a checkpoint and an engine, and write a certificate: ready for RL, not ready, or not decided.

    The answer is 'ready' if all checks that apply to the model pass. Some of them need --engine, so without it, the
    answer cannot be 'ready'. It is 'not ready' if a check fails, and 'not decided' if checks are missing. Exit status:
    0 ready, 1 not ready, 2 could not run, 3 not decided. Interrupted runs resume when you repeat the command.

    With --verify, no checks run. Instead, the command reads an existing certificate. Exit status: 0 if the certificate
    is unchanged, was made for PATH, and meets the requirements that you pass (--engine, --full, --length,
    --public-key); otherwise 1. Its answer, for example 'not ready', does not count.
    """
    if verify is not None:
        require_only(context, APPLIES_TO_VERIFY, "--verify")
        _verify(verify, path, json_file, engine=engine, full=full, length=length, public_key=public_key)
        return
    if public_key is not None or length:
        raise typer.BadParameter("--public-key and --length need --verify")
    from nrl_models.certify import Answer
    from nrl_models.certify import certify as run
    from nrl_models.certify.report import badge as as_badge
    from nrl_models.certify.report import markdown as as_markdown
    from nrl_models.certify.report import write_html
    from nrl_models.certify.signing import load_key
    from nrl_models.certify.signing import sign as sign_file
    from nrl_models.common.checkpoint.writing import write_whole
    from nrl_models.common.mesh_sizes import parse_mesh

    check_device(device)
    if sign is not None:
        load_key(sign, private=True)  # a wrong key is reported before the checks run
    deadline = None if budget is None else time.monotonic() + budget
    with status("hashing files") as note:
        certificate = run(
            path,
            engine=engine,
            engine_options=dict(engine_option or ()),
            dtype=torch_dtype(dtype),
            device=device,
            budget=budget,
            full=full,
            seed=seed,
            out=out,
            only=only or (),
            skip=skip or (),
            fresh=fresh,
            layers=layers,
            loop_mesh=None if in_loop is None else {} if in_loop == "none" else parse_mesh(in_loop),
            progress=lambda name, results: note(_progress(name, results, deadline)) if name else None,
        )
    assert certificate.folder is not None
    if sign is not None:
        sign_file(certificate.folder / "certificate.json", sign)
    write_html(certificate, certificate.folder / REPORT)
    if markdown is not None:
        write_whole(markdown, as_markdown(certificate))
    if badge is not None:
        write_whole(badge, as_badge(certificate))
    write_json(json_file, certificate.to_json())
    show_certificate(certificate, verbose=True)
    if certificate.answer is not Answer.READY:
        raise typer.Exit(1 if certificate.answer is Answer.NOT_READY else NOT_DECIDED)


def show_certificate(certificate: Certificate, *, verbose: bool) -> None:
    """Print the answer of a certificate, its results, and where it and its report are.

    Args:
        certificate: a saved certificate.
        verbose: whether to print checks that passed or do not apply.
    """
    assert certificate.folder is not None
    show(f"{certificate.answer.upper()}: {certificate.subject}: {certificate.counts}")
    left_out: dict[str, list[str]] = {}
    for result in certificate.results:
        if not verbose and result.status.name in ("PASSED", "NOT_APPLICABLE"):
            continue
        if result.status.name == "LEFT_OUT":  # up to 23 checks with the same reason
            left_out.setdefault(result.summary, []).append(result.name)
            continue
        show(f"  {result.status:<14}  {result.name}: {result.summary}")
        if result.side:
            show(f"{'':18}source: {result.side}")
        if result.advice and result.status.name in ("FAILED", "NOT_DECIDED"):
            show(f"{'':18}what to do: {result.advice}")
    for reason, names in left_out.items():
        show(f"  {'left out':<14}  {', '.join(names)}: {reason}")
    show(f"certificate: {certificate.folder / 'certificate.json'}")
    show(f"report: {certificate.folder / REPORT}")


def _progress(name: str, results: Sequence[object], deadline: float | None) -> str:
    left = "" if deadline is None else f", {max(0.0, deadline - time.monotonic()):.0f} s of the budget left"
    plural = "" if len(results) == 1 else "s"
    return f"checking {name} ({len(results)} result{plural} so far{left})"


def _verify(file: Path, path: Path, json_file: Path | None, **required: Any) -> None:
    from dataclasses import asdict

    from nrl_models.certify import Validity
    from nrl_models.certify import verify as run

    verification = run(file, path, **required)
    answer = f"; the answer is: {verification.answer}" if verification.answer else ""
    show(f"{verification.validity.upper()}: {file} for {path}{answer}")
    for reason in verification.reasons:
        show(f"  {reason}")
    write_json(json_file, asdict(verification))
    if verification.validity is not Validity.VALID:
        raise typer.Exit(1)
