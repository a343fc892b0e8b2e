"""An engine in a process of its own: a line of JSON asks, a line of JSON answers.

An answer with `error` says what failed there. What the process prints otherwise is kept, and quoted if it dies.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from nrl_models.engines.answers import Checked
from nrl_models.errors import EngineError

LAST_LINES = 12
"""Lines of its output that are quoted if it dies: the last one first, which says most."""


class WorkerProcess:
    """A running worker.

    Args:
        command: what runs it; the program first.
        who: what errors call it.
        environment: its environment variables.

    Raises:
        EngineError: the program does not run.
    """

    def __init__(self, command: Sequence[str], who: str, environment: Mapping[str, str]) -> None:
        self.who = who
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process
        try:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env=environment,
                text=True,
            )
        except OSError as error:
            self._errors.close()
            raise EngineError(f"{command[0]} does not run: {error.strerror}") from error

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Send a line, and read the line that answers it.

        Raises:
            EngineError: the worker reports an error, has died, or answers with something else than a JSON object.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            print(json.dumps(request), file=self.process.stdin, flush=True)
        except OSError as error:
            raise self._died() from error
        line = self.process.stdout.readline()
        if not line:
            raise self._died()
        checked = Checked(self.who)
        try:
            answer = checked.mapping(json.loads(line), "it")
        except (ValueError, RecursionError) as error:
            raise checked.error(f"answered with something that is not JSON: {line[:200]!r}") from error
        if "error" in answer:
            raise EngineError(f"{self.who} failed: {' '.join(str(answer['error']).split())[:600]}")
        return answer

    def close(self) -> None:
        """End the process: by the end of its input, and if that does not help, by force."""
        if self.process.stdin is not None:
            with suppress(BrokenPipeError):  # it died before it had read what was sent
                self.process.stdin.close()
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()
        self._errors.close()

    def _died(self) -> EngineError:
        self.process.wait()
        self._errors.seek(0)
        *before, last = self._errors.read().decode(errors="replace").strip().splitlines()[-LAST_LINES:] or ["nothing"]
        said = f"{self.who} died (exit status {self.process.returncode}), and said last: {last}"
        return EngineError(said, *(f"  {line}" for line in before))
