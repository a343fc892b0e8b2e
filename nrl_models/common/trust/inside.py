"""List the files of a directory, without files that its links would include from elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from nrl_models.common.checkpoint.generations import contents_of
from nrl_models.errors import CheckpointError, Problem, ProblemKind


def files_inside(
    folder: Path, ignored: Callable[[str, list[str]], Collection[str]], left_out: Collection[Path] = ()
) -> dict[Path, Path]:
    """Return the files in a directory and its subdirectories: relative path to actual file.

    Links to files or directories inside are followed, including chains and absolute links. In a snapshot of the hub's
    cache, all files are links to the repository's `blobs`, which count as inside. After an interrupted save, `folder`
    is a directory inside the checkpoint's, with links to files of the checkpoint's directory.

    Args:
        folder: The directory.
        ignored: Function that returns names to skip, as from `shutil.ignore_patterns`.
        left_out: Directories to skip.

    Raises:
        CheckpointError: If links lead outside, to nothing, or to a directory that contains them, or an entry is neither
            a file nor a directory. Lists all of them.
    """
    root = folder.resolve()
    allowed, skipped = contents_of(root), {path.resolve() for path in left_out}
    problems: list[Problem] = []

    def note(relative_path: Path, detail: str) -> None:
        problems.append(Problem(ProblemKind.FILE, str(relative_path), detail))

    def below(folder: Path, at: Path, parents: tuple[Path, ...]) -> Iterator[tuple[Path, Path]]:
        """Yield the files of `folder`, which has relative path `at` and parent directories `parents`."""
        names = sorted(path.name for path in folder.iterdir())
        for name in sorted(set(names) - set(ignored(str(folder), names))):
            path, relative_path = folder / name, at / name
            try:
                real = path.resolve(strict=True)
            except (OSError, RuntimeError):  # RuntimeError: links in a circle, before Python 3.13
                note(relative_path, "is a link that leads nowhere")
                continue
            if not any(real.is_relative_to(directory) for directory in allowed):
                note(relative_path, f"is a link that leaves the directory, to {real}")
            elif real.is_dir():
                if real in parents:
                    note(relative_path, f"is a link to {real}, which it is in")
                elif real not in skipped:
                    yield from below(path, relative_path, (*parents, real))
            elif real.is_file():
                yield relative_path, real
            else:
                note(relative_path, "is neither a file nor a directory")

    files = dict(below(folder, Path(), (root,)))
    if problems:
        advice = "put the files themselves into the directory, or remove the links"
        raise CheckpointError(f"cannot copy what is in {folder}", problems, [advice])
    return files
