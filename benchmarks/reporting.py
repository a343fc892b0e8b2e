"""Shared output of the benchmarks: print a table and write the figures as JSON."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
"""Results of the last run of each benchmark. `run.py` writes them into docs/benchmarks.md."""

Row = dict[str, Any]


def arguments(description: str, runs: int, sizes: Sequence[str] = ()) -> argparse.Namespace:
    """Parse the options of every benchmark, and `--size` if there are several sizes. The first is the default."""
    parser = argparse.ArgumentParser(description=description)
    if sizes:
        parser.add_argument("--size", choices=sizes, default=sizes[0], help="how much is measured")
    parser.add_argument("--runs", type=int, default=runs, help="measurements of each; the median counts")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON file")
    return parser.parse_args()


def child(code: str, *arguments: str) -> Any:
    """Run Python code in a new process, and parse the JSON in the last line of its output."""
    command = [sys.executable, "-c", code, *arguments]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return json.loads(output.splitlines()[-1])


def median(rows: Sequence[Row], key: str) -> float:
    """Return the median of one column."""
    return statistics.median(row[key] for row in rows)


def null_ratio(figures: Sequence[float]) -> float:
    """Return the median ratio of each measurement to the next one. It would be 1 on a machine without noise."""
    return median_ratio(figures, [*figures[1:], figures[0]])


def median_ratio(figures: Sequence[float], peers: Sequence[float]) -> float:
    """Return the median ratio of measurements to those of a peer in the same turns."""
    return statistics.median(one / other for one, other in zip(figures, peers, strict=True))


def publish(name: str, title: str, rows: list[Row], out: Path, notes: Sequence[str] = ()) -> None:
    """Print `rows` as a table, and write them to `<name>.json` together with a description of the machine."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in rows[0]:
        table.add_column(column, justify="left" if isinstance(rows[0][column], str) else "right")
    for row in rows:
        table.add_row(*(cell(value) for value in row.values()))
    Console(width=None if sys.stdout.isatty() else 140).print(table)
    for note in notes:
        Console().print(note, highlight=False)
    save(name, title, rows, out, notes)


def save(name: str, title: str, rows: list[Row], out: Path, notes: Sequence[str] = ()) -> None:
    """Write `rows` to `<name>.json` together with a description of the machine."""
    out.mkdir(parents=True, exist_ok=True)
    content = {"title": title, "machine": machine(), "notes": list(notes), "rows": rows}
    (out / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")


def cell(value: Any) -> str:
    """Return a value as tables show it, with three significant digits."""
    if not isinstance(value, float):
        return "" if value is None else str(value)
    return f"{float(f'{value:.3g}'):,.0f}" if 1000 <= abs(value) < 1e7 else f"{value:.3g}"


def heading(column: str) -> str:
    """Return the heading of a column of figures."""
    return {"way": "method", "what": "case"}.get(column, column).replace("peer", "baseline")


def machine() -> dict[str, str]:
    """Describe the machine."""
    import torch

    return {
        "date": date.today().isoformat(),
        "processor": f"{_processor()}, {os.cpu_count()} cores",
        "load": f"{os.getloadavg()[0]:.1f}",  # more than cores: other processes were running
        "accelerator": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())
