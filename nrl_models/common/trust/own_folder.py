"""Directories owned by this library. It only deletes and replaces files in these, by its own names."""

from __future__ import annotations

from pathlib import Path

from nrl_models.common.checkpoint.generations import TEMPLATES
from nrl_models.common.checkpoint.local_path import short_name
from nrl_models.errors import shown

MARKER = ".nrl_models"
"""File that marks such a directory. It contains the directory's purpose."""

IGNORE_ALL = "*\n"
"""Contents of a `.gitignore` for all files of its directory."""


def claim(folder: Path, purpose: str) -> bool:
    """Make `folder` a directory owned by this library.

    Args:
        folder: The directory; created if necessary.
        purpose: Contents of the directory in a few words.

    Returns:
        True if the directory was new, empty, or already marked for that purpose. False for any other directory, which
        is then unchanged.
    """
    marker = folder / MARKER
    if marker.is_file():
        return marker.read_text(errors="replace").strip() == purpose
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        return False
    folder.mkdir(parents=True, exist_ok=True)
    marker.write_text(purpose + "\n")
    return True


def why_not_claimed(folder: Path) -> str:
    """Return the message for a directory that `claim` left unchanged."""
    return f"{folder} {reason_not_claimed(folder)}: choose another directory (--out)"


def reason_not_claimed(folder: Path) -> str:
    """Return why `claim` left a directory unchanged."""
    if not folder.is_dir():
        return "is a file, expected a directory"
    if (marker := folder / MARKER).is_file():
        purpose = marker.read_text(errors="replace").strip()
        return f"belongs to another command: its {MARKER} says {shown(purpose)}"
    return f"is not empty, and has no file {MARKER} that marks a directory of this command"


def default_folder(command: str, checkpoint: str | Path, digest: str) -> Path:
    """Return `COMMAND/NAME-DIGEST` in the current directory. Creates `COMMAND`, which git ignores.

    Args:
        command: Name of the command that saves results.
        checkpoint: Path of the checkpoint; NAME is its last part, or a digest of a long one. For a directory of the
            hub's cache (`models--OWNER--NAME/snapshots/HASH`), NAME is the repository's.
        digest: Hash of all inputs of the results; DIGEST is its first 8 characters.
    """
    parent = Path(command)
    if not parent.exists():
        parent.mkdir()
        (parent / ".gitignore").write_text(IGNORE_ALL)
    path = Path(checkpoint).resolve()
    name = path.parents[1].name.rpartition("--")[2] if path.parent.name == "snapshots" else path.name
    return parent / f"{short_name(name)}-{digest[:8]}"


def results_in(checkpoint: Path) -> set[Path]:
    """Return the marked directories in a checkpoint's directory, which have results of commands that ran there.

    Templates are read without being named in another file, so a marker does not exclude their directory.

    Args:
        checkpoint: Directory of the checkpoint.
    """
    return {path.parent for path in checkpoint.rglob(MARKER)} - {checkpoint, checkpoint / TEMPLATES}


def release(folder: Path) -> None:
    """Delete a claimed directory that has no files besides the marker, and a parent that `default_folder` created."""
    if [path.name for path in folder.iterdir()] != [MARKER]:
        return
    (folder / MARKER).unlink()
    folder.rmdir()
    ignored = folder.parent / ".gitignore"
    if list(folder.parent.iterdir()) == [ignored] and ignored.read_text() == IGNORE_ALL:
        ignored.unlink()
        folder.parent.rmdir()
