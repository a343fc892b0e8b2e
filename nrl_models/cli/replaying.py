"""`nrl-models replay`: compute the verdict of a capsule again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from nrl_models.cli.arguments import FILE, JsonFile
from nrl_models.cli.checkpoint_paths import existing_file
from nrl_models.cli.console import show, write_json


def replay(
    file: Annotated[
        Path,
        typer.Argument(
            parser=existing_file,
            metavar=FILE,
            help="A capsule: the record of a difference, written by nrl-models consistency --capsule or by "
            "nrl_models.watch (docs/watch.md).",
        ),
    ],
    json_file: JsonFile = None,
) -> None:
    """Recompute from a capsule (the record of a failed comparison) which side was wrong, trainer or engine.

    Needs no model and no engine. Exit status: 0 if the recomputed verdict equals the recorded one, 1 if it differs, 2
    if the file is damaged or not a capsule.
    """
    from nrl_models.consistency.capsule.capsule_file import CapsuleKind, Contents, reading
    from nrl_models.consistency.capsule.consistency_capsule import replay_consistency
    from nrl_models.watch.drift_capsule import replay_watch

    contents = Contents.read(file)
    with reading(file):
        result = {CapsuleKind.CONSISTENCY: replay_consistency, CapsuleKind.WATCH: replay_watch}[contents.kind](contents)
    for line in result.lines:
        show(line)
    write_json(json_file, result.to_json())
    if not result.passed:
        raise typer.Exit(1)
