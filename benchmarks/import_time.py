"""Measure startup: `import nrl_models` and `nrl-models --help` as complete processes, next to bare Python and torch."""

from __future__ import annotations

import subprocess
import sys
import time
from statistics import median

from benchmarks.reporting import Row, arguments, publish

COMMANDS: dict[str, tuple[list[str], float | None]] = {
    "python -c pass": (["-c", "pass"], None),
    "import nrl_models": (["-c", "import nrl_models"], 0.1),
    "nrl-models --help": (["-m", "nrl_models", "--help"], 0.3),
    "import torch": (["-c", "import torch"], None),
}
"""The code to start, and its time limit in seconds."""


def main() -> None:
    """Measure, print and save the results."""
    options = arguments(__doc__ or "", runs=15)
    times: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(options.runs + 1):
        for name, (command, _limit) in COMMANDS.items():
            started = time.perf_counter()
            subprocess.run([sys.executable, *command], stdout=subprocess.DEVNULL, check=True)
            times[name].append(time.perf_counter() - started)
    torch_time = median(times["import torch"][1:])
    rows: list[Row] = [
        {
            "command": name,
            "seconds": median(times[name][1:]),
            "limit, s": limit or "",
            "relative to `import torch`": median(times[name][1:]) / torch_time,
        }
        for name, (_, limit) in COMMANDS.items()
    ]
    publish("import_time", "Starting up", rows, options.out)


if __name__ == "__main__":
    main()
