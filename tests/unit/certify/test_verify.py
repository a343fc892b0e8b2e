"""Any change of the checkpoint or the certificate voids the certificate."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints import new_model
from recipe_inputs import byte_tokenizer
from transformers import LlamaConfig

from nrl_models.certify import Status, Validity, certify, verify
from nrl_models.certify import certificate as certificate_module
from nrl_models.onboarding.convert import convert
from nrl_models.testing.tiny import tiny_config

CHANGES = 250
"""Number of random single-byte changes per file, in each of four files."""


@pytest.fixture(scope="module")
def certified(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint and its certificate."""
    folder = tmp_path_factory.mktemp("verify") / "tiny"
    model = new_model(tiny_config(LlamaConfig))
    model.save_pretrained(folder)
    byte_tokenizer(model.config).save_pretrained(folder)
    certificate = certify(folder, out=folder.parent / "out", only=("files",))
    assert certificate.folder is not None
    return folder, certificate.folder / "certificate.json"


def test_unchanged_certificate_is_valid(certified: tuple[Path, Path]) -> None:
    folder, certificate = certified
    verification = verify(certificate, folder)
    assert (verification.validity, verification.reasons, verification.answer) == (Validity.VALID, (), "not decided")


def test_count_of_one_check_is_singular(certified: tuple[Path, Path]) -> None:
    folder, certificate = certified
    content = certify(folder, out=certificate.parent, only=("files",))
    assert content.counts.startswith("1 check passed, ")


def test_unknown_format_error_names_required_version(certified: tuple[Path, Path], tmp_path: Path) -> None:
    folder, certificate = certified
    content = json.loads(certificate.read_text())
    content |= {"format": 99, "versions": content["versions"] | {"nrl_models": "7.0"}}
    other = tmp_path / "certificate.json"
    other.write_text(json.dumps(content))
    verification = verify(other, folder)
    assert verification.validity is Validity.VOID
    (reason,) = verification.reasons
    assert "has certificate format 99, which nrl_models 7.0 reads; the installed nrl_models" in reason


@pytest.mark.parametrize(
    "change",
    [
        lambda content: [content.pop(name) for name in set(content) - {"format"}],
        lambda content: content.update(answer="perhaps"),
        lambda content: content.update(options={}),
        lambda content: content.update(files=3),
        lambda content: content.update(checks=[{"name": "files"}]),
        lambda content: content["checks"][0].update(length="x"),
        lambda content: content.update(not_covered="abc"),
        lambda content: content["options"].update(layers="x"),
    ],
)
def test_invalid_content_with_correct_digest_is_void(
    change: Callable[[dict[str, Any]], object], certified: tuple[Path, Path], tmp_path: Path
) -> None:
    folder, certificate = certified
    content = json.loads(certificate.read_text())
    change(content)
    content["digest"] = certificate_module.json_digest({k: v for k, v in content.items() if k != "digest"})
    other = tmp_path / "certificate.json"
    other.write_bytes(certificate_module._file_bytes(content))
    verification = verify(other, folder, engine="vllm", full=True)
    assert verification.validity is Validity.VOID
    assert "is not a certificate" in verification.reasons[0]


def test_file_that_is_not_json_is_void(certified: tuple[Path, Path], tmp_path: Path) -> None:
    folder, _ = certified
    (tmp_path / "broken.json").write_text("{")
    verification = verify(tmp_path / "broken.json", folder)
    assert verification.validity is Validity.VOID
    assert "is not a certificate (CheckpointError: " in verification.reasons[0]
    assert "\n" not in verification.reasons[0]  # the command would print it escaped


@pytest.mark.long
@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "certificate.json"])
def test_single_byte_change_is_void(name: str, certified: tuple[Path, Path], tmp_path: Path) -> None:
    source, certificate = certified
    folder = shutil.copytree(source, tmp_path / "tiny")
    shutil.copy(certificate, tmp_path / "certificate.json")
    file = tmp_path / name if name == "certificate.json" else folder / name
    original = file.read_bytes()
    generator = random.Random(name)
    for _ in range(CHANGES):
        position = generator.randrange(len(original))
        changed = bytearray(original)
        changed[position] ^= generator.randrange(1, 256)
        file.write_bytes(changed)
        verification = verify(tmp_path / "certificate.json", folder)
        assert verification.validity is Validity.VOID, f"byte {position}"
        assert verification.reasons
        assert verification.answer is None
    file.write_bytes(original)
    assert verify(tmp_path / "certificate.json", folder).validity is Validity.VALID


@pytest.mark.parametrize("line_end", [b"\r", b"\r\n"])
def test_changed_line_endings_are_void(line_end: bytes, certified: tuple[Path, Path], tmp_path: Path) -> None:
    folder, certificate = certified
    changed = tmp_path / "certificate.json"
    changed.write_bytes(certificate.read_bytes().replace(b"\n", line_end))
    assert verify(changed, folder).validity is Validity.VOID


def test_added_and_removed_files_are_reported(certified: tuple[Path, Path], tmp_path: Path) -> None:
    source, certificate = certified
    folder = shutil.copytree(source, tmp_path / "tiny")
    (folder / "vocab.json").write_text("{}")
    (folder / "modeling_tiny.py").write_text("")
    (folder / "tiny.tiktoken").write_text("")
    (folder / "generation_config.json").unlink()
    (folder / "README.md").write_text("not read by a model")
    verification = verify(certificate, folder)
    assert verification.reasons == (
        "generation_config.json: removed",
        "modeling_tiny.py: added",
        "tiny.tiktoken: added",
        "vocab.json: added",
    )


def test_unchecked_versions_and_options_are_narrower(
    certified: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, certificate = certified
    verification = verify(certificate, folder, engine="vllm", full=True, length=1000)
    assert verification.validity is Validity.NARROWER
    assert verification.reasons == (
        "engine: none was checked, not vllm",
        "length: 0 tokens were checked, not 1,000",
        "matrix: not all of the guide's 36 cells were checked (log-probabilities)",
    )
    options: Any = {"engine": "hf-generate", "full": True, "only": ("files",)}
    unchecked = certify(folder, out=certificate.parent / "unchecked", **options).folder
    assert unchecked is not None
    verification = verify(unchecked / "certificate.json", folder, engine="hf-generate", full=True)
    assert verification.reasons == (
        "engine: none was checked, not hf-generate",
        "matrix: not all of the guide's 36 cells were checked (log-probabilities)",
    )
    installed = certificate_module.versions() | {"torch": "99.0"}
    monkeypatch.setattr(certificate_module, "versions", lambda: installed)
    (reason,) = verify(certificate, folder).reasons
    assert reason.startswith("torch: ")
    assert reason.endswith("99.0 is installed")


def test_certificates_in_checkpoint_directory_are_ignored(
    certified: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "tiny"
    shutil.copytree(certified[0], folder)
    monkeypatch.chdir(folder)
    first = certify(".", only=("files",))
    assert first.folder is not None
    assert first.folder.parent == Path("certify")
    assert verify(first.folder / "certificate.json", ".").validity is Validity.VALID
    again = certify(".", only=("tokenizer",))
    assert again.folder == first.folder
    assert {result.name for result in again.results if result.status is Status.PASSED} == {"files", "tokenizer"}
    convert(".", tmp_path / "out")
    assert not list((tmp_path / "out").rglob("certificate.json"))
    # A marker does not exclude templates, which are read without being named elsewhere.
    templates = Path("additional_chat_templates")
    templates.mkdir()
    for name in (".nrl_models", "other.jinja"):
        (templates / name).write_text("results of nrl-models certify")
    assert verify(again.folder / "certificate.json", ".").reasons == ("additional_chat_templates/other.jinja: added",)
