"""What takes an update's announcements to a vLLM server: its routes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nrl_models.engines.answers import Checked

Request = Callable[[str, str, dict[str, Any] | None], dict[str, Any]]
"""Method, path and body of a request; gives the JSON object that is the answer."""


class ServerClient:
    """A vLLM server's routes for new weights (0.32: where `VLLM_SERVER_DEV_MODE=1`).

    Args:
        request: asks the server; raises an EngineError for whatever is no success.
        checked: reads its answers.
    """

    def __init__(self, request: Request, checked: Checked) -> None:
        self._request, self._checked = request, checked

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """See `SyncClient`."""
        self._request("POST", "/init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        """See `SyncClient`."""
        self._request("POST", "/start_weight_update", None)

    def update_weights(self, update_info: Any) -> None:
        """See `SyncClient`."""
        self._request("POST", "/update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """See `SyncClient`."""
        body = None if weight_version is None else {"weight_version": weight_version}
        self._request("POST", "/finish_weight_update", body)

    def weight_version(self) -> str:
        """The version that the server says it has."""
        answer = self._request("GET", "/weight_info", None)
        return self._checked.text(answer.get("weight_version"), "weight_version")

    def checksums(self) -> dict[str, str]:
        """A checksum of each tensor that the server's workers hold (vLLM's `/weight_checker`)."""
        found = self._checked.mapping(self._request("POST", "/weight_checker", {"action": "checksum"}), "it")
        listed = self._checked.mapping(found.get("checksums"), "checksums")
        return {name: self._checked.text(checksum, "a checksum") for name, checksum in listed.items()}

    def pause(self) -> None:
        """Let what is being generated end, begin nothing, and drop what was computed for earlier prompts."""
        self._request("POST", "/pause?mode=wait&clear_cache=true", None)

    def resume(self) -> None:
        """Go on; before that drop what was computed for earlier prompts, and require that it was dropped."""
        answer = self._request("POST", "/reset_prefix_cache", None)
        if answer.get("success") is not True:
            self._checked.wrong("success of /reset_prefix_cache", answer.get("success"), "True")
        self._request("POST", "/resume", None)
