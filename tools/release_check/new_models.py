"""Try the model types that a new transformers release adds, with new classes or with another model's class.

    python -m tools.release_check.new_models --out FILE.jsonl --folders dory lara_mini ... [--jobs N]

A new class runs through `nrl-models new --out-of-tree`. A model type that transformers serves with another model's
class is saved by transformers and loaded by nrl_models.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum, auto
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

from nrl_models import registry
from nrl_models.errors import one_line
from tools.release_check.failing_function import failing_function
from tools.release_check.findings import Finding, Kind, Phase
from tools.release_check.outcome_files import OutcomeFile
from tools.release_check.workers import Ending, Result, run_subjects

TIMEOUT = 900.0
"""Timeout of one model type in seconds. Its generated tests take one or two minutes."""

TOLERANCE = 1e-4

MAPPINGS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
)
"""transformers' lists of classes that generate text."""


class Ended(StrEnum):
    """The outcome of a model type."""

    PASSED = auto()
    FAILED = auto()
    REGISTERED = auto()
    """A family serves it. The sweep over all classes tests it."""


@dataclass(frozen=True)
class Served:
    """A class that serves a model type.

    Args:
        model_type: The configuration's model type.
        class_name: transformers' class.
        is_own: Whether class and configuration belong to the same model.
        folder: The configuration's folder in transformers.
    """

    model_type: str
    class_name: str
    is_own: bool
    folder: str


def main(arguments: list[str] | None = None) -> int:
    """Try every model type, and append outcomes to a file. Returns 1 if one fails."""
    parser = argparse.ArgumentParser(description="Try model types that a new transformers adds.")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines file; an interrupted run resumes from it")
    parser.add_argument("--folders", nargs="*", default=[], help="model folders that the release adds")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="worker processes; default: one a core")
    options = parser.parse_args(arguments)
    file = OutcomeFile(options.out, ("model_type",))
    finished = {line["model_type"] for line in file}
    wanted = [one.model_type for one in served() if not one.is_own or one.folder in options.folders]
    left = [model_type for model_type in dict.fromkeys(wanted) if model_type not in finished]
    for event in run_subjects(outcomes_of, left, jobs=options.jobs, timeout=TIMEOUT):
        if isinstance(event, Result):
            file.add({"model_type": event.subject, **event.value})
        elif event.ending is not Ending.FINISHED:
            finding = _finding(Kind.NOT_ONBOARDED, event.subject, str(event.ending), event.detail)
            file.add({"model_type": event.subject, "ended": Ended.FAILED, "finding": finding.to_json()})
    return 1 if any(line["ended"] == Ended.FAILED for line in file) else 0


def served() -> list[Served]:
    """Return the class of every model type that generates text."""
    found: list[Served] = []
    for mapping in MAPPINGS:
        for model_type, names in getattr(modeling_auto, mapping, {}).items():
            name = names if isinstance(names, str) else names[0]
            model_class, config_name = getattr(transformers, name, None), CONFIG_MAPPING_NAMES.get(model_type)
            if model_class is None or config_name is None:
                continue
            folder = CONFIG_MAPPING[model_type].__module__.split(".")[2]
            is_own = model_class.__module__.split(".")[2] == folder or model_class.config_class.__name__ == config_name
            found.append(Served(model_type, name, is_own, folder))
    return found


def outcomes_of(model_type: str) -> Iterator[dict[str, Any]]:
    """Return the outcome of a model type, for the first class that serves it."""
    one = next(found for found in served() if found.model_type == model_type)
    if one.is_own and one.class_name in registry.architectures():
        yield {"ended": Ended.REGISTERED}
        return
    try:
        finding = _onboarded(one) if one.is_own else _loaded(one)
    except Exception as error:
        function = failing_function(error)
        kind = Kind.NOT_ONBOARDED if one.is_own else Kind.NOT_SERVED
        finding = _finding(kind, one.model_type, type(error).__name__, one_line(error), function, one.class_name)
    yield {"ended": Ended.FAILED, "finding": finding.to_json()} if finding else {"ended": Ended.PASSED}


def _onboarded(one: Served) -> Finding | None:
    """Generate a family for a class, outside of the repository."""
    from nrl_models.onboarding.new import new_family

    config = CONFIG_MAPPING[one.model_type]()
    config.architectures = [one.class_name]
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "model"
        config.save_pretrained(source)
        made = new_family(source, out_of_tree=Path(folder) / "family")
    if made.ok:
        return None
    return _finding(
        Kind.NOT_ONBOARDED, one.model_type, "undecided", "; ".join(made.undecided)[:500], "", one.class_name
    )


def _loaded(one: Served) -> Finding | None:
    """Load a checkpoint of a class that another model type also uses, and compare logits."""
    from nrl_models.auto import auto_class_for
    from nrl_models.inputs.model_inputs import inputs_for
    from nrl_models.testing.tiny import tiny_config

    model_class = getattr(transformers, one.class_name)
    config = tiny_config(CONFIG_MAPPING[one.model_type], {}, model_class)
    torch.manual_seed(0)
    reference = model_class._from_config(config).eval()
    with tempfile.TemporaryDirectory() as folder:
        reference.save_pretrained(folder)
        written: Mapping[str, Any] = json.loads((Path(folder) / "config.json").read_text())
        if written["model_type"] != one.model_type:
            return _finding(Kind.NOT_SERVED, one.model_type, "config.json", f"saved as {written['model_type']}")
        model = auto_class_for(folder).from_pretrained(folder).eval()
        inputs = inputs_for(reference, length=12, images=True)
        with torch.no_grad():
            difference = (model(**inputs).logits - reference(**inputs).logits).abs().max().item()
    if difference <= TOLERANCE:
        return None
    return _finding(Kind.NOT_SERVED, one.model_type, "logits", f"logits differ by {difference:.3g}", "", one.class_name)


def _finding(
    kind: Kind, model_type: str, detail: str, message: str, function: str = "", class_name: str = ""
) -> Finding:
    return Finding(
        Phase.NEW,
        kind,
        function or model_type,
        detail,
        functions=(function,) if function else (),
        architectures=(class_name,) if class_name else (),
        item=model_type,
        message=f"{model_type}: {message}",
    )


if __name__ == "__main__":
    sys.exit(main())
