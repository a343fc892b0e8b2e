"""Runs the cases of one section in this process: `python -m benchmarks.gpu.context SECTION`; see `__main__.py`."""

from __future__ import annotations

import argparse
import gc
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import torch

from benchmarks.gpu.outcomes import CheckError, Outcome, Results
from benchmarks.gpu.sections import SECTIONS
from benchmarks.reporting import Row

Case = Callable[[], list[Row]]


@dataclass(frozen=True)
class Context:
    """Settings of the cases.

    Args:
        device: Device of the measurements.
        tiny: Whether to run at tiny sizes, which show that everything runs, and no speed.
        peak: The device's peak in operations per second; None if unknown.
    """

    device: torch.device
    tiny: bool
    peak: float | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the measurements: bf16, and fp32 at tiny sizes, where equality is checked more closely."""
        return torch.float32 if self.tiny else torch.bfloat16


def main() -> None:
    """Run the missing cases of a section, and save each outcome."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("section", choices=[section.name for section in SECTIONS])
    parser.add_argument("--results", type=Path, required=True, help="JSON file of the run")
    parser.add_argument("--cpu", action="store_true", help="run on a CPU at tiny sizes")
    parser.add_argument("--peak", type=float, help="peak of the device in TFLOPS")
    options = parser.parse_args()
    device = torch.device("cpu") if options.cpu else torch.device("cuda", 0)
    context = Context(device, options.cpu, options.peak * 1e12 if options.peak else None)
    section = next(section for section in SECTIONS if section.name == options.section)
    module = import_module(f"benchmarks.gpu.{section.module}")
    cases = module.cases(context)
    gc.freeze()  # collections between runs then skip torch and transformers
    run_cases(Results(options.results), section.name, cases, getattr(module, "WORKERS", 1))


def run_cases(results: Results, section: str, cases: Mapping[str, Case], workers: int = 1) -> None:
    """Run the cases that have no outcome. A case that fails is recorded, and the others go on."""
    results.plan(section, cases)

    def run(name: str) -> None:
        started = time.perf_counter()
        outcome = _outcome(cases[name])
        outcome.seconds = time.perf_counter() - started
        results.add(section, name, outcome)
        print(f"  {name}: {outcome.error or 'ok'} ({outcome.seconds:.0f} s)", flush=True)

    missing = results.sections[section].missing
    if workers == 1:
        for name in missing:
            run(name)
    else:
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(run, missing))


def _outcome(case: Case) -> Outcome:
    try:
        return Outcome(case())
    except CheckError as error:
        return Outcome(error.rows, f"check failed: {error}")
    except Exception as error:  # the other cases go on
        traceback.print_exc()  # into the log
        detail = (str(error).strip() or "no message").splitlines()[0]
        return Outcome([], f"{type(error).__name__}: {detail}"[:300])
    finally:
        gc.collect()
        with suppress(RuntimeError):  # of a device that an illegal access has stopped
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
