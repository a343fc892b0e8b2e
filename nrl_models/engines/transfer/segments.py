"""Tensors in memory shared between two processes of one machine, in the safetensors format.

A segment is a file in memory (`memfd_create(2)`) without a name. Another process opens it through the writer's
descriptor, which the system permits only to processes of the same user. Segments are sealed: no process can modify or
truncate them. The memory is freed when the last process closes or unmaps it, even after a crash.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import safetensors
import torch

from nrl_models.common.checkpoint.stored_tensors import DTYPES
from nrl_models.errors import EngineError, one_line, shown

_SEALS = ("F_SEAL_SEAL", "F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_WRITE")

_CODES = {dtype: code for code, dtype in DTYPES.items()}
"""safetensors' names of dtypes."""

_TOKEN = "nrl_models"
"""The key of a segment's token in its header."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Location of a segment. It can be opened until its writer closes it.

    Args:
        pid: Process that wrote it.
        descriptor: File descriptor in that process.
        token: Random token in its header, to recognize the right file.
        nbytes: Size in bytes.
    """

    pid: int
    descriptor: int
    token: str
    nbytes: int

    @staticmethod
    def write(tensors: Mapping[str, torch.Tensor], text: Mapping[str, str] | None = None) -> Segment:
        """Write tensors into a new segment of this process.

        Args:
            tensors: Tensors by name, on any device.
            text: Metadata.

        Raises:
            EngineError: If such memory is not available (it needs Linux), or not large enough, or safetensors has no
                name for a dtype.
        """
        if not hasattr(os, "memfd_create"):
            raise EngineError("weights cannot be shared in memory: this needs Linux (memfd_create)")
        token = secrets.token_hex(16)
        cpu_tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        # Written without safetensors, which copies all data first, or writes to another path and renames the file.
        header, ordered = _header(cpu_tensors, {**(text or {}), _TOKEN: token})
        nbytes = len(header) + sum(tensor.nbytes for tensor in ordered)
        try:
            descriptor = os.memfd_create("nrl_models", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            try:
                with open(descriptor, "wb", closefd=False) as file:
                    file.write(header)
                    for tensor in ordered:
                        if tensor.numel():
                            file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
                fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _all_seals())
            except BaseException:
                os.close(descriptor)
                raise
        except OSError as error:
            raise EngineError(f"{nbytes:,} bytes of weights cannot be put into memory: {one_line(error)}") from error
        return Segment(os.getpid(), descriptor, token, nbytes)

    def read(self) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """Read the segment. Returns tensors that map its pages (and keep them alive), and its metadata.

        Raises:
            EngineError: If it cannot be opened, or is not a segment.
        """
        path = f"/proc/{self.pid}/fd/{self.descriptor}"
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise EngineError(
                f"the trainer's shared memory cannot be opened ({one_line(error)}): trainer and engine have to run on "
                "one machine as one user and see each other's processes, and the trainer has to be alive"
            ) from error
        try:
            if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _all_seals() != _all_seals():
                raise OSError("it can still be changed")
            with safetensors.safe_open(f"/proc/self/fd/{descriptor}", framework="pt") as file:
                text: dict[str, str] = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (OSError, safetensors.SafetensorError) as error:
            raise EngineError(f"{path} is not a trainer's shared memory: {one_line(error)}") from error
        finally:
            os.close(descriptor)
        if not secrets.compare_digest(text.pop(_TOKEN, ""), self.token):
            raise EngineError(f"{path} is another trainer's shared memory than the one announced")
        return tensors, text

    def close(self) -> None:
        """Close it in the process that wrote it. It can no longer be opened, but existing mappings stay valid."""
        os.close(self.descriptor)

    def to_json(self) -> dict[str, Any]:
        """Return JSON values for `of_json`."""
        return {"pid": self.pid, "descriptor": self.descriptor, "token": self.token, "nbytes": self.nbytes}

    @staticmethod
    def of_json(value: Any) -> Segment:
        """Parse the output of `to_json`.

        Raises:
            EngineError: If the value is invalid.
        """
        types = {"pid": int, "descriptor": int, "token": str, "nbytes": int}
        fits = isinstance(value, dict) and {key: type(field) for key, field in value.items()} == types
        if not fits or min(value["pid"], value["descriptor"], value["nbytes"]) < 0 or not value["token"].isascii():
            raise EngineError(f"{shown(value)} is not a segment of shared memory: expected {', '.join(types)}")
        return Segment(**value)


def _header(tensors: Mapping[str, torch.Tensor], text: Mapping[str, str]) -> tuple[bytes, list[torch.Tensor]]:
    """Return the header of a safetensors file, and the tensors in the file's order, which aligns them."""
    names = sorted(tensors, key=lambda name: -tensors[name].itemsize)
    entries: dict[str, Any] = {"__metadata__": text}
    end = 0
    for name in names:
        tensor = tensors[name]
        if tensor.dtype not in _CODES:
            raise EngineError(f"{name} is {tensor.dtype}, which safetensors cannot store: send another dtype")
        start, end = end, end + tensor.nbytes
        entries[name] = {"dtype": _CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    encoded = json.dumps(entries).encode()
    encoded += b" " * (-len(encoded) % 8)
    return len(encoded).to_bytes(8, "little") + encoded, [tensors[name] for name in names]


def _all_seals() -> int:
    return sum(getattr(fcntl, name) for name in _SEALS)
