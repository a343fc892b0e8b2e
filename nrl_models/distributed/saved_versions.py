"""The versions of a resume checkpoint in a folder: `version-1`, `version-2` and so on, of which the newest counts.

A version is there when it is whole: its directory is renamed into place. What is older goes after that.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from torch.distributed.device_mesh import DeviceMesh

from nrl_models.common.checkpoint.local_path import CONFIG_NAME
from nrl_models.distributed.manifest import NAME, Manifest, Part, WrittenFile, read_manifest
from nrl_models.distributed.mesh import agreed, gather_over, is_first, place_in, reporting_dead_ranks
from nrl_models.errors import CheckpointError, Problem, ProblemKind

_VERSION = re.compile(r"version-([1-9]\d{0,17})")
_OLD_MANIFEST = "training.json"


def versions_in(folder: Path) -> list[Path]:
    """The versions in a folder, the newest first; none if there is no such folder."""
    found = folder.iterdir() if folder.is_dir() else ()
    numbers = sorted((int(match[1]) for path in found if (match := _VERSION.fullmatch(path.name))), reverse=True)
    return [folder / f"version-{number}" for number in numbers]


def next_version(folder: Path) -> Path:
    """Where the next version goes."""
    newest = next((int(path.name.removeprefix("version-")) for path in versions_in(folder)), 0)
    return folder / f"version-{newest + 1}"


def remove_older(version: Path) -> None:
    """Remove the versions before one, and of them only what was written as a part of them.

    What has no manifest that can be read stays: nothing says whose it is.
    """
    for older in versions_in(version.parent):
        if older == version:
            continue
        with suppress(CheckpointError):
            manifest = read_manifest(older)
            for name in (*manifest.files, NAME):  # the manifest last, or a save that is killed here leaves the others
                (older / name).unlink(missing_ok=True)
        with suppress(OSError):  # something else is in it
            older.rmdir()


def whole_version(folder: Path, parts: Sequence[Part], mesh: DeviceMesh, what: str) -> tuple[Path, Manifest]:
    """The newest version and its manifest, once every byte of the files of `parts` has been compared with its hash.

    Every rank of the mesh calls it, and reads a share of the files.

    Args:
        folder: of the versions.
        parts: which are wanted.
        mesh: whose ranks read.
        what: what they are about to do, for messages.

    Raises:
        CheckpointError: there is none, or the newest is damaged: on every rank, with all that is, and whether an older
            version is whole.
        ShardingError: ranks see other versions, or a rank is gone.
    """
    with agreed(mesh, what):
        found = _found(folder)
    with reporting_dead_ranks(what):
        ((newest, *older), *_) = gather_over(mesh, found)  # the first rank's: others may see old lists of a network's
    manifest, own = _examined(newest, parts, place_in(mesh), mesh.size())
    with reporting_dead_ranks(what):
        problems = list(dict.fromkeys(problem for each in gather_over(mesh, own) for problem in each))
        if problems:
            (advice, *_) = gather_over(mesh, _advice(newest, older, parts) if is_first(mesh) else "")
            raise CheckpointError(f"{newest} is damaged", problems, [advice])
    assert manifest is not None
    return newest, manifest


def _found(folder: Path) -> list[Path]:
    """The versions in a folder.

    Raises:
        CheckpointError: there is none.
    """
    if found := versions_in(folder):
        return found
    advice = "give a folder that save_checkpoint wrote; a plain Hugging Face checkpoint loads with from_pretrained"
    detail = "has no version-1, version-2, ... in it, so this is not a complete checkpoint"
    if (folder / _OLD_MANIFEST).is_file():
        detail = f"has {_OLD_MANIFEST}: an older version of this library wrote it, with pickles, which are not read"
        advice = "resume with the version that wrote it, and save it with save_pretrained"
    raise CheckpointError(f"cannot resume from {folder}", [Problem(ProblemKind.FILE, str(folder), detail)], [advice])


def _examined(version: Path, parts: Sequence[Part], place: int, count: int) -> tuple[Manifest | None, list[Problem]]:
    """A version's manifest, if that is whole, and what is wrong with its files, of `count` shares that at `place`."""
    try:
        manifest = read_manifest(version)
    except CheckpointError as error:
        return None, list(error.problems)
    problems = []
    names = sorted((CONFIG_NAME, *manifest.files_of(*parts)), key=lambda name: -manifest.files[name].bytes)
    for name in names[place::count]:
        written = manifest.files[name]
        try:
            size = (version / name).stat().st_size if (version / name).is_file() else None
            if size is None:
                problems.append(Problem(ProblemKind.FILE, name, "is not there"))
            elif size != written.bytes:
                detail = f"has {size} bytes; {written.bytes} were written"
                problems.append(Problem(ProblemKind.FILE, name, detail))
            elif WrittenFile.of(version / name) != written:
                problems.append(Problem(ProblemKind.FILE, name, "has other bytes than were written: its hash differs"))
        except OSError as error:
            problems.append(Problem(ProblemKind.FILE, name, f"cannot be read: {error}"))
    return manifest, problems


def replaced(version: Path) -> list[str]:
    """What to do if a version's files went while they were read, because another was saved; nothing otherwise."""
    now = versions_in(version.parent)
    return (
        [f"{now[0].name} was saved while {version.name} was read: load again"] if now[:1] not in ([], [version]) else []
    )


def _advice(newest: Path, older: Sequence[Path], parts: Sequence[Part]) -> str:
    """What to do about a damaged version."""
    if again := replaced(newest):
        return again[0]
    if whole := next((path for path in older if not _examined(path, parts, 0, 1)[1]), None):
        return f"{whole.name} beside it is whole: to resume from that, move {newest.name} out of the folder"
    return "no older version that is whole is beside it: copy it again, or take another checkpoint"
