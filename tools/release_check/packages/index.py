"""Releases and wheels on the package index, read through its JSON API (PEP 691)."""

from __future__ import annotations

import io
import os
import sys
from dataclasses import dataclass
from functools import cache
from urllib.parse import urljoin

import httpx2
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.tags import Tag, sys_tags
from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from packaging.version import Version

from nrl_models.errors import one_line
from tools.release_check.errors import NoIndexError, NoReleaseError

DEFAULT_INDEX = "https://pypi.org/simple"
JSON = "application/vnd.pypi.simple.v1+json"
SECONDS = 60.0


@dataclass(frozen=True)
class Wheel:
    """A wheel on the index that this interpreter can install.

    Args:
        version: Version of the package.
        url: Its URL.
        size: Size in bytes. 0 if the index does not report it.
    """

    version: Version
    url: str
    size: int


def index_url() -> str:
    """Return the index that pip uses, from the same environment variable."""
    return os.environ.get("PIP_INDEX_URL", DEFAULT_INDEX).rstrip("/")


@cache
def wheels(package: str) -> dict[Version, Wheel]:
    """Return the wheels of every release that was not yanked, by version in ascending order.

    Raises:
        NoIndexError: The index does not respond.
        NoReleaseError: The index does not have the package.
    """
    url = f"{index_url()}/{package}/"
    try:
        response = httpx2.get(url, headers={"Accept": JSON}, timeout=SECONDS, follow_redirects=True)
        if response.status_code == 404:
            raise NoReleaseError(f"{package}: not on the index {index_url()}")
        response.raise_for_status()
        files = response.json()["files"]
        named = [(file["filename"], urljoin(str(response.url), file["url"]), file) for file in files]
    except (httpx2.HTTPError, httpx2.InvalidURL, ValueError, KeyError, TypeError) as error:
        raise NoIndexError(f"{url}: {one_line(error)}. Check the network, or set PIP_INDEX_URL") from error
    ranks = {tag: rank for rank, tag in enumerate(sys_tags())}
    best: dict[Version, tuple[int, Wheel]] = {}
    for filename, file_url, file in named:
        try:
            _, version, _, tags = parse_wheel_filename(filename)
        except (InvalidWheelFilename, ValueError):
            continue  # a source distribution, or a legacy file name
        rank = _rank(tags, ranks)
        if rank is None or file.get("yanked") or not _admits(file.get("requires-python")):
            continue
        if version not in best or rank < best[version][0]:
            best[version] = rank, Wheel(version, file_url, file.get("size") or 0)
    return {version: best[version][1] for version in sorted(best)}


def newest(package: str) -> Version:
    """Return the newest final release that this interpreter can install.

    Raises:
        NoIndexError: The index does not respond.
        NoReleaseError: There is none.
    """
    final = [version for version in wheels(package) if not version.is_prerelease]
    if not final:
        raise NoReleaseError(
            f"{package}: the index has no release for Python {sys.version_info[0]}.{sys.version_info[1]}"
        )
    return final[-1]


def wheel(package: str, version: Version) -> Wheel:
    """Return the wheel of a version.

    Raises:
        NoIndexError: The index does not respond.
        NoReleaseError: The version does not exist, or has no wheel for this interpreter.
    """
    known = wheels(package)
    if version not in known:
        latest = ", ".join(map(str, list(known)[-3:]))
        raise NoReleaseError(f"{package}=={version}: the index has no such release for this Python; newest: {latest}")
    return known[version]


class RemoteFile(io.RawIOBase):
    """A remote file, read in parts: `zipfile` then fetches only the members that it opens.

    Args:
        url: Its URL.
        size: Its size in bytes.
    """

    BLOCK = 1 << 20

    def __init__(self, url: str, size: int) -> None:
        self._url, self._size, self._position = url, size, 0
        self._client = httpx2.Client(timeout=SECONDS, follow_redirects=True)
        self._blocks: dict[int, bytes] = {}

    def seekable(self) -> bool:
        """Return True: `seek` is supported."""
        return True

    def readable(self) -> bool:
        """Return True: `read` is supported."""
        return True

    def tell(self) -> int:
        """Return the position."""
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to a position, as `io.IOBase.seek` does."""
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._size}[whence]
        self._position = start + offset
        return self._position

    def read(self, size: int = -1) -> bytes:
        """Read up to `size` bytes from the position.

        Raises:
            NoIndexError: The server does not respond.
        """
        end = self._size if size < 0 else min(self._position + size, self._size)
        if self._position >= end:
            return b""
        numbers = range(self._position // self.BLOCK, (end - 1) // self.BLOCK + 1)
        content = b"".join(map(self._block, numbers))
        start = self._position - numbers[0] * self.BLOCK
        part = content[start : start + end - self._position]
        self._position = end
        return part

    def _block(self, number: int) -> bytes:
        if number not in self._blocks:
            start = number * self.BLOCK
            last = min(start + self.BLOCK, self._size) - 1
            try:
                response = self._client.get(self._url, headers={"Range": f"bytes={start}-{last}"})
                response.raise_for_status()
            except httpx2.HTTPError as error:
                raise NoIndexError(f"{self._url}: {one_line(error)}") from error
            if response.status_code != 206:
                raise NoIndexError(f"{self._url}: the server does not send parts of a file")
            self._blocks[number] = response.content
        return self._blocks[number]

    def close(self) -> None:
        """Close the connection."""
        self._client.close()
        super().close()


def _rank(tags: frozenset[Tag], ranks: dict[Tag, int]) -> int | None:
    return min((ranks[tag] for tag in tags if tag in ranks), default=None)


def _admits(requires_python: str | None) -> bool:
    try:
        return ".".join(map(str, sys.version_info[:3])) in SpecifierSet(requires_python or "")
    except InvalidSpecifier:
        return True
