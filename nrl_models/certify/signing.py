"""Sign certificates with a user's Ed25519 key, and verify the signature. Uses `cryptography` (extra `sign`)."""

from __future__ import annotations

import base64
import binascii
from pathlib import Path
from typing import Any

from nrl_models.common.checkpoint.writing import write_whole
from nrl_models.errors import ConsistencyError, one_line

SUFFIX = ".sig"
"""The signature of `certificate.json` is in `certificate.json.sig`: base64 in one line."""


def sign(file: Path, key: Path) -> Path:
    """Sign a file. Returns the file with the signature.

    Args:
        file: the certificate.
        key: private Ed25519 key in PEM format, without a password (`openssl genpkey -algorithm ed25519`).

    Raises:
        ConsistencyError: `cryptography` is not installed, or the key is not such a key.
    """
    private = load_key(key, private=True)
    signature = file.with_name(file.name + SUFFIX)
    write_whole(signature, base64.b64encode(private.sign(file.read_bytes())).decode() + "\n")
    return signature


def signature_problem(file: Path, public_key: Path) -> str:
    """Return why a file's signature is not valid; empty if it is.

    Args:
        file: the certificate. Its signature is next to it.
        public_key: public Ed25519 key in PEM format (`openssl pkey -in KEY -pubout`).

    Raises:
        ConsistencyError: `cryptography` is not installed, or the key is not such a key.
    """
    public = load_key(public_key, private=False)
    from cryptography.exceptions import InvalidSignature

    signature = file.with_name(file.name + SUFFIX)
    if not signature.is_file():
        return f"{signature} is missing: the certificate is not signed"
    try:
        public.verify(base64.b64decode(signature.read_bytes().strip(), validate=True), file.read_bytes())
    except (InvalidSignature, binascii.Error):
        return f"{signature} is not a signature of {file.name} by {public_key.name}"
    return ""


def load_key(file: Path, *, private: bool) -> Any:
    """Read a private or public Ed25519 key in PEM format.

    Raises:
        ConsistencyError: `cryptography` is not installed, or the file has no such key.
    """
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
        from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_pem_public_key
    except ImportError as error:
        raise ConsistencyError("signatures need cryptography: pip install '.[sign]' in a checkout") from error
    expected = ed25519.Ed25519PrivateKey if private else ed25519.Ed25519PublicKey
    kind = "private" if private else "public"
    try:
        content = file.read_bytes()
        key = load_pem_private_key(content, None) if private else load_pem_public_key(content)
    except Exception as error:  # any error of a file that has no such key
        raise ConsistencyError(f"{file} is not a {kind} key in PEM format: {one_line(error)}") from error
    if not isinstance(key, expected):
        raise ConsistencyError(f"{file} is a {type(key).__name__}: expected a {kind} Ed25519 key")
    return key
