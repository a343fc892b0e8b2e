"""Write the fixtures of `numbers` for every registered class that transformers has, and for some others.

    python -m tools.release_check.numbers.write_cases [--names LlamaForCausalLM ...]

Run it when a class is registered. Existing fixtures stay, because numbers recorded with them would lose their meaning;
`--again` replaces those that are named.
"""

from __future__ import annotations

import argparse
import operator
import sys
import tempfile
from collections.abc import Mapping
from functools import reduce
from pathlib import Path
from typing import Any

import torch

from nrl_models import registry
from nrl_models.errors import one_line
from nrl_models.testing.case import FamilyCase
from tools.release_check.numbers import unregistered
from tools.release_check.numbers.cases import (
    FOLDER,
    NumberCase,
    case_names,
    filled,
    stated,
    stored_tensors,
    with_every_value,
)
from tools.release_check.sweep.class_checks import quiet

LENGTH = 24
"""Sequence length in tokens: longer than the sliding windows of tiny configurations."""

CONFIG_VALUES: Mapping[str, Mapping[str, Any]] = {
    # Keys that transformers 5.5 does not read. With other values, all results would differ from its results.
    "GptOssForCausalLM": {"swiglu_limit": 7.0},
    "GptOssForSequenceClassification": {"swiglu_limit": 7.0},
    "GptOssForTokenClassification": {"swiglu_limit": 7.0},
    "BltForCausalLM": {"patcher_config": {"sliding_window": 512}},
    # Keys of published configurations that the class reads but does not declare.
    "Qwen2_5OmniThinkerForConditionalGeneration": {"vision_start_token_id": 490},
    "Qwen3OmniMoeThinkerForConditionalGeneration": {"vision_start_token_id": 490},
}
"""Values for tiny configurations where the general rules fail."""

PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "Gemma4ForCausalLM": {"global_head_dim": 64, "per_layer_config": None},
    "Gemma4ForConditionalGeneration": {
        "text_config.global_head_dim": 64,
        "text_config.per_layer_config": None,
        "vision_config.rope_parameters.rope_type": "default",
    },
    "NemotronHForCausalLM": {"layers_block_type": ["mamba", "moe", "attention", "mlp"], "mtp_layers_block_type": None},
}
"""Values of published configurations, for newer configuration classes that write values older releases do not read.
None removes a key.
"""


def main(arguments: list[str] | None = None) -> int:
    """Write the fixtures. Returns 1 if one cannot be created."""
    parser = argparse.ArgumentParser(description="Write the tiny checkpoints and inputs on which numbers runs.")
    parser.add_argument("--names", nargs="+", metavar="NAME", help="architectures; default: all without a fixture")
    parser.add_argument("--again", action="store_true", help="replace existing fixtures of --names")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the fixtures are")
    options = parser.parse_args(arguments)
    existing = set() if options.again and options.names else set(case_names(options.folder))
    failed = 0
    for name in options.names or [*registry.architectures(aliases=False), *unregistered.CASES]:
        if name in existing or (name not in unregistered.CASES and registry.unmet_requirement(name)):
            continue
        try:
            case = unregistered.make_case(name) if name in unregistered.CASES else make_case(name)
        except Exception as error:
            print(f"{name}: {one_line(error)}", file=sys.stderr)
            failed = 1
            continue
        if case is not None:
            case.to_file(options.folder)
    return failed


def make_case(architecture: str) -> NumberCase | None:
    """Create the fixture of an architecture with the installed transformers. None if transformers has no such class."""
    model_class: Any = registry.model_class(architecture)
    reference_class = model_class.reference_class()
    if not reference_class.__module__.startswith("transformers."):
        return None
    case = FamilyCase(model_class, torch.device("cpu"), CONFIG_VALUES.get(architecture, {}))
    with quiet(), tempfile.TemporaryDirectory() as folder:
        reference = case.reference()
        reference.save_pretrained(folder)
        tensors = stored_tensors(Path(folder))
        inputs = {kind: _inputs(case, images) for kind, images in (("text", False), ("media", None))}
    if inputs["media"] is not None and inputs["text"] is not None and inputs["media"].keys() == inputs["text"].keys():
        inputs["media"] = None
    return NumberCase(
        architecture,
        reference_class.__module__,
        _as_published(with_every_value(reference.config), PUBLISHED.get(architecture, {})),
        {name: stated(tensors[name]) for name in sorted(tensors)},
        {kind: values for kind, values in inputs.items() if values is not None},
        model_class.can_generate(),
    )


def _as_published(values: dict[str, Any], published: Mapping[str, Any]) -> dict[str, Any]:
    for path, value in published.items():
        *parents, key = path.split(".")
        part = reduce(operator.getitem, parents, values)
        part.pop(key, None)
        if value is not None:
            part[key] = value
    return values


def _inputs(case: FamilyCase, images: bool | None) -> dict[str, dict[str, Any]] | None:
    """Describe inputs with labels. None if the class does not accept this kind."""
    try:
        inputs = case.inputs(length=LENGTH, images=images, labels=True)
        with torch.no_grad():
            case.reference()(**inputs)
    except Exception:  # an unsupported image format, or text without an image
        return None
    values = {name: stated(value) for name, value in inputs.items()}
    try:
        with torch.no_grad():
            case.reference()(**{name: filled(name, value) for name, value in values.items()})
    except Exception:  # some floating-point inputs contain positions
        return {name: stated(value, literally=True) for name, value in inputs.items()}
    return values


if __name__ == "__main__":
    sys.exit(main())
