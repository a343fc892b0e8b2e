"""The files of a directory, without what its links would bring in from elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from nrl_models.common.checkpoint.generations import plain
from nrl_models.errors import CheckpointError, Problem, ProblemKind


def files_inside(
    folder: Path, ignored: Callable[[str, list[str]], Collection[str]], left_out: Collection[Path] = ()
) -> dict[Path, Path]:
    """The files in a directory and below: for each path, relative to it, the file itself.

    Links are followed to what is inside, be they chains or absolute, to files or to directories. In a snapshot of the
    hub's cache all files are links to the repository's `blobs`, which count as inside. Where a save was interrupted,
    `folder` is a directory in the checkpoint's, with links to what is beside it there.

    Args:
        folder: the directory.
        ignored: names to leave out, as `shutil.ignore_patterns` gives them.
        left_out: directories to leave out.

    Raises:
        CheckpointError: links that lead elsewhere, nowhere, or to a directory they are in; what is neither a file nor a
            directory. All of them.
    """
    root = folder.resolve()
    found = _Files([plain(root), *_blobs(root)], {path.resolve() for path in left_out}, ignored)
    files = dict(found.below(folder, Path(), (root,)))
    if found.problems:
        advice = "put the files themselves into the directory, or remove the links"
        raise CheckpointError(f"cannot copy what is in {folder}", found.problems, [advice])
    return files


def _blobs(root: Path) -> list[Path]:
    return [root.parent.parent / "blobs"] if root.parent.name == "snapshots" else []


class _Files:
    """Walks a directory, and collects what is wrong."""

    def __init__(
        self, allowed: list[Path], left_out: set[Path], ignored: Callable[[str, list[str]], Collection[str]]
    ) -> None:
        self.allowed, self.left_out, self.ignored = allowed, left_out, ignored
        self.problems: list[Problem] = []

    def below(self, folder: Path, at: Path, parents: tuple[Path, ...]) -> Iterator[tuple[Path, Path]]:
        """Files of `folder`, which is `at` in the whole, in the directories `parents`."""
        names = sorted(path.name for path in folder.iterdir())
        for name in sorted(set(names) - set(self.ignored(str(folder), names))):
            path, place = folder / name, at / name
            try:
                real = path.resolve(strict=True)
            except (OSError, RuntimeError):  # RuntimeError: links in a circle, before Python 3.13
                self._problem(place, "is a link that leads nowhere")
                continue
            if not any(real.is_relative_to(allowed) for allowed in self.allowed):
                self._problem(place, f"is a link that leaves the directory, to {real}")
            elif real.is_dir():
                if real in parents:
                    self._problem(place, f"is a link to {real}, which it is in")
                elif real not in self.left_out:
                    yield from self.below(path, place, (*parents, real))
            elif real.is_file():
                yield place, real
            else:
                self._problem(place, "is neither a file nor a directory")

    def _problem(self, place: Path, detail: str) -> None:
        self.problems.append(Problem(ProblemKind.FILE, str(place), detail))
