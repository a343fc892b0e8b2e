"""Clients that announce an update to a vLLM server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nrl_models.engines.answers import Checked

Request = Callable[[str, str, dict[str, Any] | None], dict[str, Any]]
"""Function of method, path and body of a request. Returns the JSON object of the answer."""


class ServerClient:
    """Client of a vLLM server's routes for new weights (vLLM 0.32 with `VLLM_SERVER_DEV_MODE=1`).

    Args:
        request: Sends a request; raises `EngineError` unless the status is a success.
        checked: Validates the answers.
    """

    def __init__(self, request: Request, checked: Checked) -> None:
        self._request, self._checked = request, checked

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Prepare the workers, see `SyncClient`."""
        self._request("POST", "/init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        """Begin an update, see `SyncClient`."""
        self._request("POST", "/start_weight_update", None)

    def update_weights(self, update_info: Any) -> None:
        """Announce weights, see `SyncClient`."""
        self._request("POST", "/update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """End an update, see `SyncClient`."""
        body = None if weight_version is None else {"weight_version": weight_version}
        self._request("POST", "/finish_weight_update", body)

    def weight_version(self) -> str:
        """Return the version that the server reports."""
        answer = self._request("GET", "/weight_info", None)
        return self._checked.text(answer.get("weight_version"), "weight_version")

    def checksums(self) -> dict[str, str]:
        """Return a checksum of each tensor in the server's workers, from vLLM's `/weight_checker`."""
        answer = self._checked.mapping(self._request("POST", "/weight_checker", {"action": "checksum"}), "it")
        listed = self._checked.mapping(answer.get("checksums"), "checksums")
        return {name: self._checked.text(checksum, "a checksum") for name, checksum in listed.items()}

    def pause(self) -> None:
        """Wait for running requests, hold new ones, and clear the prefix cache."""
        self._request("POST", "/pause?mode=wait&clear_cache=true", None)

    def resume(self) -> None:
        """Clear the prefix cache, verify that it is cleared, and continue with requests."""
        answer = self._request("POST", "/reset_prefix_cache", None)
        if answer.get("success") is not True:
            self._checked.wrong("success of /reset_prefix_cache", answer.get("success"), "True")
        self._request("POST", "/resume", None)
