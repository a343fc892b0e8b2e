"""Compare resume checkpoints with torch's DCP, over one and two ranks: time, and what survives a kill.

`save_checkpoint` is compared with `torch.distributed.checkpoint`: `save`, `async_save`, and `save` with its safetensors
writer (`HuggingFaceStorageWriter`). All of them save the same sharded model (`fully_shard`, gloo) with AdamW's state,
in turns. Each overwrites the checkpoint that it saved in the turn before. All call fsync, unless the name says
otherwise. "returns" is the time until training can continue, "complete" the time until all ranks have written the
checkpoint. Seconds are medians, and ratios are medians of the ratios of each turn, so a ratio can differ from the
quotient of two medians. The null ratio compares DCP's `save` with itself: each measurement with the next one. Without
noise, it would be 1.

Kills: all ranks are killed (SIGKILL) at four points of a save over an older checkpoint. Then the directory is loaded.
"old" and "new" count complete checkpoints, "lost" those that do not load or have values of both. Here, DCP also saves
into the directory of the last checkpoint, and overwrites its files. To avoid losing it, users of DCP save each
checkpoint into a new directory, and must find the last complete one and delete the others themselves.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.reporting import RESULTS, Row, median_ratio, null_ratio, publish
from benchmarks.resume_worker import BASELINE, SAVES

ROOT = Path(__file__).parent.parent


def main() -> None:
    """Measure, print and save the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5, help="measurements of each; the median counts")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the JSON file")
    options = parser.parse_args()
    rows: list[Row] = []
    for ranks in (1, 2):
        for what, size in (("kill", "large"), ("time", "tiny")):
            found = worker(what, ranks, size, options.runs if size == "large" else 3 * options.runs)
            rows += [_row(name, ranks, found) for name in SAVES]
    publish("save_resume", "Resume checkpoints", rows, options.out)


def worker(what: str, ranks: int, size: str, runs: int) -> dict[str, Any]:
    """Run `resume_worker` in a new process."""
    command = [sys.executable, "-m", "benchmarks.resume_worker", what, str(ranks), size, str(runs)]
    output = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT).stdout
    result: dict[str, Any] = json.loads(output.splitlines()[-1])
    return result


def _row(name: str, ranks: int, found: dict[str, Any]) -> Row:
    own, peer = ([row["complete"] for row in found["seconds"][each]] for each in (name, BASELINE))
    size = found["bytes"]
    return {
        "ranks": ranks,
        "state": f"{size / 1e6:.0f} MB" if size > 10e6 else f"{size / 1e3:.0f} kB",
        "call": name,
        "returns, s": statistics.median(row["returns"] for row in found["seconds"][name]),
        "complete, s": statistics.median(own),
        f"complete / {BASELINE}": median_ratio(own, peer),
        "null ratio": null_ratio(peer),
        **_after_kills(found.get("outcomes", {}).get(name, {})),
    }


def _after_kills(outcomes: dict[str, int]) -> Row:
    """Return the number of kills after which the old, the new or no checkpoint loads; None if nothing was killed."""
    counts = {each: outcomes.get(each, 0) for each in ("old", "new")}
    counts["lost"] = sum(outcomes.values()) - sum(counts.values())
    return {f"after kills: {each}": count if outcomes else None for each, count in counts.items()}


if __name__ == "__main__":
    main()
