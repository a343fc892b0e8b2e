"""An engine in a subprocess. Requests and answers are lines of JSON.

A request has a number (`id`), and its answer repeats it. If a call is interrupted, the next call discards its answer.
If a request fails in the subprocess, the answer has the message in `error`. Other output of the subprocess is kept and
quoted if it dies.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from queue import SimpleQueue
from threading import Thread
from typing import IO, Any

from nrl_models.engines.answers import Checked
from nrl_models.errors import EngineError

LAST_LINES = 12
"""Number of output lines to quote if the process dies, starting with the last."""


class WorkerProcess:
    """A worker subprocess.

    Args:
        command: Program and arguments.
        engine_name: Engine name shown in errors.
        environment: Environment variables.

    Raises:
        EngineError: If the program does not start.
    """

    def __init__(self, command: Sequence[str], engine_name: str, environment: Mapping[str, str]) -> None:
        self.engine_name = engine_name
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process
        try:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env=environment,
                text=True,
                errors="replace",
            )
        except OSError as error:
            self._errors.close()
            raise EngineError(f"{command[0]} does not run: {error.strerror}") from error
        # Two threads read and write complete lines, because an exception in the caller's thread may interrupt a call.
        # The reader must still receive that call's answer, or the worker would block while it writes it.
        self._number = 0
        self._requests: SimpleQueue[str | None] = SimpleQueue()
        self._answers: SimpleQueue[str] = SimpleQueue()
        pipes = (_write, self._requests, self.process.stdin), (_read, self.process.stdout, self._answers)
        self._threads = [Thread(target=target, args=options, daemon=True) for target, *options in pipes]
        for thread in self._threads:
            thread.start()
        weakref.finalize(self, self._requests.put, None)

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request, and wait for its answer. An exception in this thread leaves the worker usable.

        Raises:
            EngineError: If the worker reports an error, dies, or answers with anything but a JSON object.
        """
        self._number += 1
        number = self._number
        self._requests.put(json.dumps({"id": number, **request}) + "\n")
        checked = Checked(self.engine_name)
        while True:
            line = self._answers.get()
            if not line:
                self._answers.put(line)  # for the next call
                raise self._died()
            try:
                answer = checked.mapping(json.loads(line), "it")
            except (ValueError, RecursionError) as error:
                raise checked.error(f"answered with something that is not JSON: {line[:200]!r}") from error
            if checked.whole(answer.pop("id", None), "id", 1, number + 1) == number:
                break
        if "error" in answer:
            raise EngineError(f"{self.engine_name} failed: {' '.join(str(answer['error']).split())}")
        return answer

    def close(self) -> None:
        """End the process: by the end of its input, and if that does not help, by force."""
        self._requests.put(None)
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for thread in self._threads:
            thread.join()
        self._errors.close()

    def _died(self) -> EngineError:
        self.process.wait()
        self._errors.seek(0)
        *before, last = self._errors.read().decode(errors="replace").strip().splitlines()[-LAST_LINES:] or ["nothing"]
        said = f"{self.engine_name} died (exit status {self.process.returncode}). Its last output: {last}"
        return EngineError(said, *(f"  {line}" for line in before))


def _write(requests: SimpleQueue[str | None], pipe: IO[str]) -> None:
    """Write requests until None arrives, then close the pipe."""
    with suppress(OSError), pipe:  # the process has died
        while (line := requests.get()) is not None:
            pipe.write(line)
            pipe.flush()


def _read(pipe: IO[str], answers: SimpleQueue[str]) -> None:
    """Read answers, one per line. An empty string marks their end."""
    with pipe:
        for line in pipe:
            answers.put(line)
    answers.put("")
