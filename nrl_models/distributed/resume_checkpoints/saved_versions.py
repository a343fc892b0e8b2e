"""Versions of a resume checkpoint in a folder: `version-1`, `version-2` and so on. The newest is used.

A new version is written to a temporary directory and renamed when it is complete. Older versions are deleted
afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from torch.distributed.device_mesh import DeviceMesh

from nrl_models.common.checkpoint.local_path import CONFIG_NAME, MANIFEST_NAME, VERSION, as_path
from nrl_models.distributed.mesh import agreed, gather_over, is_first, rank_number, reporting_dead_ranks
from nrl_models.distributed.resume_checkpoints.manifest import Manifest, StatePart, WrittenFile, read_manifest
from nrl_models.errors import CheckpointError, Problem, ProblemKind

_OLD_MANIFEST = "training.json"


def versions_in(folder: Path) -> list[Path]:
    """Return the versions in a folder, newest first; empty if the folder does not exist."""
    paths = folder.iterdir() if folder.is_dir() else ()
    numbers = sorted((int(match[1]) for path in paths if (match := VERSION.fullmatch(path.name))), reverse=True)
    return [folder / f"version-{number}" for number in numbers]


def next_version(folder: Path) -> Path:
    """Return the path of the next version."""
    newest = next((int(path.name.removeprefix("version-")) for path in versions_in(folder)), 0)
    return folder / f"version-{newest + 1}"


def remove_older(version: Path) -> None:
    """Remove older versions, but only files that were written as parts of them.

    A version without a readable manifest stays, because its origin is unknown.
    """
    for older in versions_in(version.parent):
        if older == version:
            continue
        with suppress(CheckpointError):
            manifest = read_manifest(older)
            # The manifest last, so that a killed removal can be continued.
            for name in (*manifest.files, MANIFEST_NAME):
                (older / name).unlink(missing_ok=True)
        with suppress(OSError):  # the directory has other files
            older.rmdir()


def whole_version(
    folder: str | Path, parts: Sequence[StatePart], mesh: DeviceMesh, action: str
) -> tuple[Path, Manifest]:
    """Return the newest version and its manifest, after comparing all files of `parts` with their hashes.

    Every rank of the mesh has to call this. Each reads a share of the files.

    Args:
        folder: Directory of the versions.
        parts: Parts to verify.
        mesh: Mesh of the ranks.
        action: The next action, for messages.

    Raises:
        CheckpointError: On every rank, if there is no version or the newest is damaged. Lists all problems, and whether
            an older version is intact.
        ShardingError: If ranks see different versions, or a rank died.
        UnknownArgumentError: If `folder` is not a path.
    """
    with agreed(mesh, action):
        versions = _found(as_path(folder))
    with reporting_dead_ranks(action):
        # The first rank's versions, because other ranks may see an old listing of a network file system.
        ((newest, *older), *_) = gather_over(mesh, versions)
    manifest, local_problems = _examined(newest, parts, rank_number(mesh), mesh.size())
    with reporting_dead_ranks(action):
        problems = list(dict.fromkeys(problem for each in gather_over(mesh, local_problems) for problem in each))
        if problems:
            (advice, *_) = gather_over(mesh, _advice(newest, older, parts) if is_first(mesh) else "")
            raise CheckpointError(f"{newest} is damaged", problems, [advice])
    assert manifest is not None
    return newest, manifest


def _found(folder: Path) -> list[Path]:
    """Return the versions in a folder.

    Raises:
        CheckpointError: If there are none.
    """
    if versions := versions_in(folder):
        return versions
    advice = "pass a folder written by save_checkpoint; load a Hugging Face checkpoint with from_pretrained"
    detail = "has no version-1, version-2, ... in it, so this is not a complete checkpoint"
    if VERSION.fullmatch(folder.name) and (folder / MANIFEST_NAME).is_file():
        detail = "is one version, and not the directory of the versions"
        advice = f"pass {folder.parent}, of which the newest version is loaded"
    elif (folder / _OLD_MANIFEST).is_file():
        detail = f"has {_OLD_MANIFEST}: an older version of this library wrote it, with pickles, which are not read"
        advice = "resume with the version that wrote it, and save it with save_pretrained"
    raise CheckpointError(f"cannot resume from {folder}", [Problem(ProblemKind.FILE, str(folder), detail)], [advice])


def _examined(
    version: Path, parts: Sequence[StatePart], index: int, count: int
) -> tuple[Manifest | None, list[Problem]]:
    """Return a version's manifest if it is valid, and problems of its files in share `index` of `count`."""
    try:
        manifest = read_manifest(version)
    except CheckpointError as error:
        return None, list(error.problems)
    problems = []
    names = sorted((CONFIG_NAME, *manifest.files_of(*parts)), key=lambda name: -manifest.files[name].bytes)
    for name in names[index::count]:
        written = manifest.files[name]
        try:
            size = (version / name).stat().st_size if (version / name).is_file() else None
            if size is None:
                problems.append(Problem(ProblemKind.FILE, name, "not found"))
            elif size != written.bytes:
                detail = f"has {size} bytes; {written.bytes} were written"
                problems.append(Problem(ProblemKind.FILE, name, detail))
            elif WrittenFile.of(version / name) != written:
                problems.append(Problem(ProblemKind.FILE, name, "has other bytes than were written: its hash differs"))
        except OSError as error:
            problems.append(Problem(ProblemKind.FILE, name, f"cannot be read: {error}"))
    return manifest, problems


def replaced(version: Path) -> list[str]:
    """Return advice if a version's files vanished while they were read, because a newer one was saved; else nothing."""
    now = versions_in(version.parent)
    return (
        [f"{now[0].name} was saved while {version.name} was read: load again"] if now[:1] not in ([], [version]) else []
    )


def _advice(newest: Path, older: Sequence[Path], parts: Sequence[StatePart]) -> str:
    """Return advice for a damaged version."""
    if again := replaced(newest):
        return again[0]
    if intact_version := next((path for path in older if not _examined(path, parts, 0, 1)[1]), None):
        return f"{intact_version.name} is intact: to resume from it, move {newest.name} out of the folder"
    return "the folder has no intact older version: copy the checkpoint again, or use another one"
