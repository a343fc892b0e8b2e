"""The campaign: faults that `certify` must find, and healthy models that it must not reject.

`PYTHONPATH=.:tests/unit python -m tests.certify.campaign` runs all and writes each outcome to a file at once; the same
command resumes. Faults stop at the first failed check, which names the source. It runs half an hour on 2 cores. With
vLLM installed, it also runs the faults of `VLLM_FAULTS`, in another half hour.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from nrl_models.certify import Certificate, Side, Status, certify
from nrl_models.certify.all_checks import CHECKS
from tests.certify import engine_faults, file_faults
from tests.certify.checkpoints_of import Edit, case_of, first_failure, save_tiny, small_settings
from tests.certify.model_faults import MODEL_FAULTS
from tools.mutants import CATALOG

WITH_ENGINE = ("files", *(name for check in CHECKS if check.needs_engine for name in check.names))
"""Checks that can find a fault of an engine."""

DRAFTED = "Glm4MoeForCausalLM"

HEALTHY = (
    "LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM", "Gemma2ForCausalLM",
    "Gemma3ForCausalLM", "GptOssForCausalLM", "Qwen3MoeForCausalLM", "Qwen2MoeForCausalLM", "MixtralForCausalLM",
    "DeepseekV3ForCausalLM", "Glm4MoeForCausalLM", "PhiForCausalLM", "Phi3ForCausalLM", "GraniteForCausalLM",
    "OlmoForCausalLM", "Olmo2ForCausalLM", "OlmoeForCausalLM", "CohereForCausalLM", "Cohere2ForCausalLM",
    "StableLmForCausalLM", "Starcoder2ForCausalLM", "GPT2LMHeadModel", "GPTNeoXForCausalLM", "OPTForCausalLM",
    "FalconForCausalLM", "Mamba2ForCausalLM", "SmolLM3ForCausalLM", "Qwen2VLForConditionalGeneration",
    "BaichuanForCausalLM",
)  # fmt: skip
"""Thirty architectures of thirty families."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The outcome of one fault or healthy model.

    Args:
        name: the fault, or the architecture.
        kind: `healthy`, or the source of the fault.
        answer: the answer of the certificate; `not ready` if a check failed.
        check: the first failed check, or those that were not decided.
        side: the source that the check names.
        summary: the check's summary.
        seconds: time it took.
    """

    name: str
    kind: str
    answer: str
    check: str = ""
    side: str = ""
    summary: str = ""
    seconds: float = 0.0

    @property
    def is_right(self) -> bool:
        """Whether a fault was found, or a healthy model not rejected."""
        return (self.answer == "not ready") != (self.kind == "healthy")

    @property
    def names_side(self) -> bool:
        """Whether the source is right."""
        return self.side == self.kind


Run = Callable[[Path], Outcome]
"""Runs in an empty folder."""


def of_files(name: str, side: Side, edit: Edit, architecture: str) -> Run:
    def run(folder: Path) -> Outcome:
        checkpoint = save_tiny(architecture, folder / "tiny")
        edit(checkpoint)
        return _faulty(name, side, checkpoint, folder)

    return run


def of_engine(name: str, plant: engine_faults.Plant, options: dict[str, Any], engine: str = "hf-generate") -> Run:
    def run(folder: Path) -> Outcome:
        checkpoint = save_tiny("LlamaForCausalLM", folder / "tiny")
        with pytest.MonkeyPatch.context() as patch:
            plant(patch)
            return _faulty(name, Side.ENGINE, checkpoint, folder, engine=engine, only=WITH_ENGINE, **options)

    return run


def of_model(architecture: str, mutant: str) -> Run:
    def run(folder: Path) -> Outcome:
        checkpoint, case = save_tiny(architecture, folder / "tiny"), case_of(architecture)
        (bug,) = (entry.bug for entry in CATALOG if entry.name == mutant)
        assert bug.is_possible(case), f"{architecture} cannot have: {mutant}"
        with bug.planted(case):
            return _faulty(f"{architecture}: {mutant}", Side.MODEL, checkpoint, folder)

    return run


def of_healthy(architecture: str) -> Run:
    def run(folder: Path) -> Outcome:
        checkpoint = save_tiny(architecture, folder / "tiny")
        if architecture == DRAFTED:
            file_faults.drafted(lambda tensors: None)(checkpoint)
        certificate = certify(checkpoint, engine="hf-generate", out=folder / "out")
        unpassed = [
            result
            for status in (Status.FAILED, Status.NOT_DECIDED, Status.LEFT_OUT)
            for result in certificate.with_status(status)
        ]
        return Outcome(
            name=architecture,
            kind="healthy",
            answer=certificate.answer,
            check=", ".join(result.name for result in unpassed),
            summary="; ".join(result.summary for result in unpassed),
        )

    return run


def _faulty(name: str, side: Side, checkpoint: Path, folder: Path, **options: Any) -> Outcome:
    outcome = first_failure(checkpoint, folder / "out", **options)
    if isinstance(outcome, Certificate):
        undecided = [f"{r.name}: {r.summary}" for r in outcome.with_status(Status.NOT_DECIDED)]
        return Outcome(name=name, kind=side, answer=outcome.answer, summary="; ".join(undecided))
    return Outcome(
        name=name, kind=side, answer="not ready", check=outcome.name, side=outcome.side or "", summary=outcome.summary
    )


FAULTS: dict[str, Run] = {
    **{name: of_files(name, *fault, "LlamaForCausalLM") for name, fault in file_faults.LLAMA.items()},
    **{name: of_files(name, *fault, DRAFTED) for name, fault in file_faults.DRAFTS.items()},
    **{name: of_engine(name, *fault) for name, fault in engine_faults.LLAMA.items()},
    **{f"{architecture}: {mutant}": of_model(architecture, mutant) for architecture, mutant in MODEL_FAULTS},
}
"""All faults by name."""

VLLM_FAULTS: dict[str, Run] = {
    f"vllm: {name}": of_engine(name, *fault, "vllm") for name, fault in engine_faults.VLLM.items()
}
"""Faults of a real vLLM, by name."""

HAS_VLLM = find_spec("vllm") is not None

ALL: dict[str, Run] = (
    FAULTS | (VLLM_FAULTS if HAS_VLLM else {}) | {architecture: of_healthy(architecture) for architecture in HEALTHY}
)


def run_one(name: str) -> Outcome:
    """Run one fault or healthy model."""
    started = time.perf_counter()
    folder = Path(tempfile.mkdtemp(prefix="certify-"))
    try:
        with small_settings():
            outcome = ALL[name](folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return Outcome(**asdict(outcome) | {"seconds": round(time.perf_counter() - started, 1)})


def main() -> int:
    """Run faults and models that have no outcome yet, and print a summary. Returns 1 if an outcome is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="faults and architectures; all without an outcome by default")
    parser.add_argument("--out", type=Path, default=Path("certify-campaign.jsonl"), help="file of outcomes")
    options = parser.parse_args()
    outcomes: dict[str, Outcome] = {}
    if options.out.is_file():
        outcomes = {
            outcome["name"]: Outcome(**outcome) for outcome in map(json.loads, options.out.read_text().splitlines())
        }
    for name in options.names or [name for name in ALL if name not in outcomes]:
        outcomes[name] = outcome = run_one(name)
        with options.out.open("a") as file:
            file.write(json.dumps(asdict(outcome)) + "\n")
        print(f"{outcome.name}: {outcome.answer}; {outcome.check} {outcome.side}; {outcome.seconds} s", flush=True)
    faults = [outcome for name, outcome in outcomes.items() if name in FAULTS]
    healthy = [outcome for name, outcome in outcomes.items() if name in HEALTHY]
    wrong = [outcome for outcome in (*faults, *healthy) if not outcome.is_right]
    print(f"faults: {sum(outcome.is_right for outcome in faults)} of {len(faults)} not ready, "
          f"{sum(outcome.names_side for outcome in faults)} with the right source")  # fmt: skip
    print(f"healthy: {sum(outcome.answer == 'ready' for outcome in healthy)} of {len(healthy)} ready, "
          f"{sum(not outcome.is_right for outcome in healthy)} not ready")  # fmt: skip
    for outcome in wrong:
        print(f"wrong: {outcome}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
