"""Names of engines and addresses of servers, and detection of secrets in them. Has no heavy imports."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from urllib.parse import quote, urlsplit

from nrl_models.errors import EngineError, did_you_mean

TRANSFORMERS_BACKEND = "vllm-transformers"
"""vLLM running transformers' model classes (`model_impl="transformers"`)."""

VLLMS = ("vllm", TRANSFORMERS_BACKEND)
"""Names of vLLM with its own or transformers' model classes."""

ENGINES = (*VLLMS, "mlx", "megatron", "hf-generate", "http://HOST:PORT")
"""Names of engines; any `http://` or `https://` address is a server."""

_SECRET = re.compile(r"(?i)(key|secret|password|[_-]token)$")
_ASSIGNED = re.compile(r"(?i)((?:key|secret|password|[_-]token)=).+")
_IN_ADDRESS = re.compile(r"//[^/\s]*@")


def is_secret(name: str) -> bool:
    """Return True if the name of an option suggests a secret: `api_key`, `hf_token`, `password`."""
    return _SECRET.search(name) is not None


def shown_argument(argument: str) -> str:
    """Return a command's argument for display, without the value of a secret and without a user and password."""
    return _IN_ADDRESS.sub("//...@", _ASSIGNED.sub(r"\1...", argument))


def hidden(text: str, secrets: Iterable[str]) -> str:
    """Remove `secrets` from `text`, also in JSON-escaped form and as part of an address."""
    for secret in filter(None, secrets):
        for form in (secret, json.dumps(secret)[1:-1], quote(secret, safe="")):
            text = text.replace(form, "...")
    return text


def server_address(text: str) -> str:
    """Return the address of a server without a trailing slash or `/v1`.

    Raises:
        EngineError: If it is not an `http://` or `https://` address, or has more than a host, a port and a path. The
            message does not repeat a user and password.
    """
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if "@" in text:
        raise EngineError(
            "a server's address contains a user and a password, which reports would show: expected "
            "http://HOST:PORT, and a key as --engine-option api_key=KEY"
        )
    rest = parts.query or parts.fragment or text.endswith(("?", "#"))
    plain = text.isascii() and text.isprintable() and not any(letter in text for letter in " \\")
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or rest or not plain:
        raise EngineError(f"{text!r} is not a server's address: expected http://HOST:PORT or https://HOST:PORT")
    return f"{parts.scheme}://{parts.netloc}{parts.path}".rstrip("/").removesuffix("/v1")


def is_server(engine: object) -> bool:
    """Return True if an engine's name is the address of a server."""
    return isinstance(engine, str) and engine.startswith(("http://", "https://"))


def require_engine(name: str) -> None:
    """Check that `name` is an engine's name, or an address without a user and password.

    Raises:
        EngineError: If it is neither.
    """
    if is_server(name):
        server_address(name)
    elif not isinstance(name, str) or name not in ENGINES:
        is_secret = isinstance(name, str) and "@" in name  # it may be a mistyped address with a password
        shown = "" if is_secret else f" {name!r}{did_you_mean(name, ENGINES)}"
        raise EngineError(f"unknown engine{shown}: expected one of {', '.join(ENGINES)}")
