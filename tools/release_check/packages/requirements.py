"""Check that installed packages are compatible: declared requirements, and calls that check another package's version.

python -m tools.release_check.packages.requirements --out FILE.jsonl
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from nrl_models.errors import one_line
from tools.release_check.failing_function import failing_function
from tools.release_check.findings import Finding, Kind, Phase
from tools.release_check.packages.installed import installed
from tools.release_check.packages.tested_versions import PACKAGES


def main(arguments: list[str] | None = None) -> int:
    """Write every finding to a file. Returns 1 if there are findings."""
    parser = argparse.ArgumentParser(description="Check that installed packages go together.")
    parser.add_argument("--out", type=Path, required=True, help="JSON lines file")
    options = parser.parse_args(arguments)
    findings = [*declared_conflicts(), *failing_calls()]
    options.out.write_text("".join(f"{json.dumps(finding.to_json())}\n" for finding in findings))
    return 1 if findings else 0


def declared_conflicts() -> Iterator[Finding]:
    """Find requirements of installed packages that other installed packages do not meet."""
    for name in installed():
        for line in requires(name) or ():
            requirement = Requirement(line)
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
                continue
            try:
                present = version(requirement.name)
            except PackageNotFoundError:
                present = ""
            concerned = {name, requirement.name.lower()} & {*PACKAGES, "nrl-models"}
            if concerned and not (present and requirement.specifier.contains(present, prereleases=True)):
                yield Finding(
                    Phase.REQUIREMENTS,
                    Kind.CONFLICT,
                    f"{name} requires {requirement.name}{requirement.specifier}",
                    present or "not installed",
                    item=f"{name} {requirement.name}",
                    message=f"{name} {version(name)} requires {requirement}; installed: {present or 'none'}",
                )


def failing_calls() -> Iterator[Finding]:
    """Find calls that combine two packages and raise an error."""
    for name, (packages, call) in CALLS.items():
        try:
            call()
        except PackageNotFoundError:
            continue
        except Exception as error:
            function = failing_function(error)
            versions = ", ".join(f"{package} {version(package)}" for package in packages)
            yield Finding(
                Phase.REQUIREMENTS,
                Kind.CONFLICT,
                " and ".join(packages),
                type(error).__name__,
                functions=(function,) if function else (),
                item=name,
                message=f"{name} ({versions}): {one_line(error)}",
            )


def _model() -> Any:
    from nrl_models import registry
    from nrl_models.testing.case import FamilyCase

    model_class: Any = registry.model_class("LlamaForCausalLM")
    return FamilyCase(model_class).model()


def _lora_config() -> Any:
    version("peft")
    from peft import LoraConfig

    return LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM")


def _add_adapter() -> None:
    config = _lora_config()
    _model().add_adapter(config)


def _load_adapter() -> None:
    from peft import get_peft_model

    model = get_peft_model(_model(), _lora_config())
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        _model().load_adapter(folder)


def _get_peft_model() -> None:
    from peft import get_peft_model

    get_peft_model(_model(), _lora_config())


def _accelerate() -> None:
    version("accelerate")
    from accelerate import Accelerator

    Accelerator(cpu=True).prepare(_model())


def _trl() -> None:
    version("trl")
    from trl import GRPOTrainer, SFTTrainer  # noqa: F401  trl imports its trainers lazily


CALLS: Mapping[str, tuple[tuple[str, str], Callable[[], None]]] = {
    "model.add_adapter": (("transformers", "peft"), _add_adapter),
    "model.load_adapter": (("transformers", "peft"), _load_adapter),
    "peft.get_peft_model": (("transformers", "peft"), _get_peft_model),
    "Accelerator.prepare": (("transformers", "accelerate"), _accelerate),
    "import of trl's trainers": (("transformers", "trl"), _trl),
}
"""Calls that combine two packages: a readable name, the packages, and the call."""


if __name__ == "__main__":
    sys.exit(main())
