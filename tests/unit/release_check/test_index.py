"""Invalid URLs and responses of a package index are one-line errors."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest
from packaging.version import Version

from tools.release_check.errors import NoIndexError
from tools.release_check.packages import index

FILE = {"filename": "peft-1.0-py3-none-any.whl", "url": "https://files/peft-1.0-py3-none-any.whl"}


def serve(content: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the index respond with JSON."""
    index.wheels.cache_clear()
    monkeypatch.setenv("PIP_INDEX_URL", "https://index/simple")

    def get(url: str, **_: Any) -> httpx2.Response:
        return httpx2.Response(200, json=content, request=httpx2.Request("GET", url))

    monkeypatch.setattr(httpx2, "get", get)


@pytest.mark.parametrize(
    "content",
    [
        [],
        None,
        {},
        {"files": None},
        {"files": ["text"]},
        {"files": [{"filename": FILE["filename"]}]},
        {"files": [{"url": FILE["url"]}]},
    ],
    ids=str,
)
def test_invalid_response_raises(content: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    serve(content, monkeypatch)
    with pytest.raises(NoIndexError, match=r"^https://index/simple/peft/: .*Check the network, or set PIP_INDEX_URL$"):
        index.wheels("peft")


def test_invalid_url_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    index.wheels.cache_clear()
    monkeypatch.setenv("PIP_INDEX_URL", "http://[::1")
    with pytest.raises(NoIndexError, match=r"^http://\[::1/peft/: "):
        index.wheels("peft")


@pytest.mark.parametrize("url", [FILE["url"], "../../files/peft.whl", "/files/peft.whl"])
def test_file_urls_may_be_relative(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    serve({"files": [FILE | {"url": url}]}, monkeypatch)
    expected = FILE["url"] if url == FILE["url"] else "https://index/files/peft.whl"
    assert index.wheels("peft")[Version("1.0")].url == expected
