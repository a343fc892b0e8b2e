"""Certificates signed with a user's key."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner
from versions import case_of

from nrl_models.certify import Validity, certify, verify
from nrl_models.certify.signing import sign
from nrl_models.cli import app
from nrl_models.errors import ConsistencyError

pytest.importorskip("cryptography")

from cryptography.hazmat.primitives.asymmetric import ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat


def write_keys(folder: Path, name: str = "key") -> tuple[Path, Path]:
    key = ed25519.Ed25519PrivateKey.generate()
    private, public = folder / f"{name}.pem", folder / f"{name}.pub"
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    public.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return private, public


@pytest.fixture
def certified(tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint and its certificate."""
    case_of("LlamaForCausalLM").reference().save_pretrained(tmp_path / "tiny")
    certificate = certify(tmp_path / "tiny", out=tmp_path / "out", only=("files",))
    assert certificate.folder is not None
    return tmp_path / "tiny", certificate.folder / "certificate.json"


def test_signature_of_other_key_is_void(certified: tuple[Path, Path], tmp_path: Path) -> None:
    folder, certificate = certified
    private, public = write_keys(tmp_path)
    _, other = write_keys(tmp_path, "other")
    verification = verify(certificate, folder, public_key=public)
    assert verification.validity is Validity.VOID
    assert "the certificate is not signed" in verification.reasons[0]
    signature = sign(certificate, private)
    assert verify(certificate, folder, public_key=public).validity is Validity.VALID
    assert verify(certificate, folder, public_key=other).validity is Validity.VOID
    changed = b"y" if signature.read_bytes().startswith(b"x") else b"x"
    signature.write_bytes(changed + signature.read_bytes()[1:])
    assert verify(certificate, folder, public_key=public).validity is Validity.VOID
    assert verify(certificate, folder).validity is Validity.VALID


def test_replaced_certificate_is_void(certified: tuple[Path, Path], tmp_path: Path) -> None:
    folder, certificate = certified
    private, public = write_keys(tmp_path)
    sign(certificate, private)
    forged = certify(folder, out=tmp_path / "forged", only=("files", "sharding"))
    assert forged.folder is not None
    certificate.write_bytes((forged.folder / "certificate.json").read_bytes())
    assert verify(certificate, folder).validity is Validity.VALID
    assert verify(certificate, folder, public_key=public).validity is Validity.VOID


def test_unsupported_keys_raise(certified: tuple[Path, Path], tmp_path: Path) -> None:
    _, certificate = certified
    _, public = write_keys(tmp_path)
    with pytest.raises(ConsistencyError, match="not a private key in PEM format"):
        sign(certificate, public)
    other = tmp_path / "rsa.pem"
    key = rsa.generate_private_key(65537, 2048)
    other.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    with pytest.raises(ConsistencyError, match="expected a private Ed25519 key"):
        sign(certificate, other)


def test_command_reports_wrong_key_before_checks(certified: tuple[Path, Path], tmp_path: Path) -> None:
    folder, _ = certified
    key = tmp_path / "key.pem"
    key.write_text("no key")
    result = CliRunner().invoke(app, ["certify", str(folder), "--out", str(tmp_path / "other"), "--sign", str(key)])
    assert result.exit_code == 2
    assert "is not a private key in PEM format" in result.output
    assert not (tmp_path / "other").exists()


def test_sign_and_verify_command(certified: tuple[Path, Path], tmp_path: Path) -> None:
    folder, _ = certified
    private, public = write_keys(tmp_path)
    out = tmp_path / "signed"
    arguments = ["certify", str(folder), "--only", "files", "--out", str(out), "--sign", str(private)]
    assert CliRunner().invoke(app, arguments).exit_code == 3
    arguments = ["certify", str(folder), "--verify", str(out / "certificate.json"), "--public-key", str(public)]
    result = CliRunner().invoke(app, arguments)
    assert (result.exit_code, result.stdout.split(":")[0]) == (0, "VALID"), result.output
    result = CliRunner().invoke(app, [*arguments, "--length", "100"])
    assert result.exit_code == 1
    assert "length: 0 tokens were checked, not 100" in result.stdout
