"""Small wheels that contain the sources of two versions of a package."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path

from tools.release_check.upstream_code.sources import Sources


def wheel(folder: Path, version: str, files: Mapping[str, str], package: str = "upstream") -> Path:
    path = folder / f"{package}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return path


def sources(folder: Path, version: str, files: Mapping[str, str]) -> Sources:
    return Sources(f"upstream {version}", zipfile.ZipFile(wheel(folder, version, files)))
