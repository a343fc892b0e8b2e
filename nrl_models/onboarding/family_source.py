"""Generate the source code of a family's package."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.metadata import version
from json import dumps
from pathlib import Path
from textwrap import fill
from typing import Any

from nrl_models.common.projections import KNOWN_GROUPS, combined_name
from nrl_models.onboarding.family_plan import FamilyPlan
from nrl_models.onboarding.inspect import ModelKind

WIDTH = 120


def write_package(plan: FamilyPlan, limits: Mapping[str, str], folder: Path) -> None:
    """Write the family's package to `folder`, overwriting earlier files.

    Args:
        plan: The family.
        limits: See `FamilyModel.limits`.
        folder: Directory of the package.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "__init__.py").write_text(f'"""{title(plan)}."""\n')
    (folder / "model.py").write_text(model_source(plan, limits))


def write_project(plan: FamilyPlan, package: str, folder: Path) -> None:
    """Write files that make a package installable: `pyproject.toml` with the entry points, and a README."""
    targets = "\n".join(f'{name} = "{package}.model:{name}"' for name in plan.architectures)
    (folder / "pyproject.toml").write_text(
        f"""[build-system]
requires = ["hatchling>=1.25"]
build-backend = "hatchling.build"

[project]
name = "{package.replace("_", "-")}"
version = "0.1.0"
description = "{title(plan)}, for nrl_models."
requires-python = ">=3.11"
dependencies = ["nrl_models>={version("nrl_models")}"]

[project.entry-points."nrl_models.families"]
{targets}

[tool.hatch.build.targets.wheel]
packages = ["{package}"]
"""
    )
    (folder / "README.md").write_text(
        f"""# {package}

{title(plan)}, for [nrl_models](https://github.com/nrl-models/nrl_models). After installation,
`from_pretrained` finds it:

```console
$ pip install --editable .
$ pytest --nrl-family {package}.model:{plan.architectures[0]}
```
"""
    )


def facts_source(plan: FamilyPlan) -> str:
    """Return the source of `__init__.py` for a family in this repository, which the registry reads."""
    names = "".join(f"\n        {dumps(name)}," for name in plan.architectures)
    return (
        f'"""{title(plan)}."""\n\nfrom nrl_models.families.facts import Family\n\n'
        f"FAMILY = Family(\n    ({names}\n    )\n)\n"
    )


def title(plan: FamilyPlan) -> str:
    """Return a one-line description of the family."""
    kinds = {ModelKind.MOE: "mixture of experts", ModelKind.VLM: "vision-language"}
    return f"{plan.config.model_type}: {', '.join(kinds.get(kind, kind) for kind in plan.kinds)}"


def model_source(plan: FamilyPlan, limits: Mapping[str, str]) -> str:
    """Return the source of the family's `model.py`."""
    modules = _aliases(plan)
    rows, used = [], set()
    for name in plan.detection.groups:
        module, _, layer = name.partition(":")
        maker, arguments = _made_of(plan, name)
        used.add(maker)
        rows += _row(f"{modules[module]}.{layer}", maker, arguments)
    for module, _, layer in (name.partition(":") for name in plan.detection.keeps_offsets):
        rows.append(f"        {modules[module]}.{layer}: FreshPositions,")
    model = plan.model_class.__name__.partition("For")[0]
    paths = [(*module.rpartition(".")[::2], alias) for module, alias in sorted(modules.items())]
    first, *others = plan.architectures
    makers = sorted(used, key=lambda name: (name.islower(), name))
    lines = [
        *(f'"""{title(plan)}."""', ""),
        *(f"from {package} import {name} as {alias}" for package, name, alias in paths),
        "",
        *(["from nrl_models.common.forward.mrope import FreshPositions"] if plan.detection.keeps_offsets else []),
        *([f"from nrl_models.common.projections import {', '.join(makers)}"] if makers else []),
        "from nrl_models.family import FamilyModel",
        *("", "", f"class {model}Family(FamilyModel):", f'    """Declarations shared by all {model} models."""', ""),
        *("    rewrites = {", *rows, "    }", *_mapping("tiny", plan.tiny), *_mapping("limits", limits)),
        *("", "", f"{first} = ModelClass = {model}Family.head(hf.{first})"),
        *(f"{name} = {model}Family.head(hf.{name})" for name in others),
    ]
    return "\n".join([*lines, ""])


def _aliases(plan: FamilyPlan) -> dict[str, str]:
    """Return import aliases of the modules of rewritten layers. The model's own module is `hf`."""
    model_module = plan.model_class.__module__
    aliases = {model_module: "hf"}
    for name in (*plan.detection.groups, *plan.detection.keeps_offsets):
        module = name.partition(":")[0]
        aliases.setdefault(module, module.rpartition(".")[2].removeprefix("modeling_"))
    return aliases


def _made_of(plan: FamilyPlan, layer: str) -> tuple[str, list[str]]:
    """Return the base of the class that replaces a layer: a class, or a function call."""
    groups = plan.detection.groups[layer]
    if layer in plan.detection.places:
        return "combine_groups", list(map(dumps, plan.detection.declarations(layer)))
    if len(groups) == 1 and (known := KNOWN_GROUPS.get(tuple(groups[0]))):
        return known.__name__, []
    return "combine", [f"{combined_name(group)}=({', '.join(map(dumps, group))})" for group in groups]


def _row(layer: str, maker: str, arguments: list[str]) -> list[str]:
    """Return a layer's line in `rewrites`, split into several lines if it is too long."""
    line = f"        {layer}: {maker}" + (f"({', '.join(arguments)})," if arguments else ",")
    if len(line) <= WIDTH or not arguments:
        return [line]
    return [f"        {layer}: {maker}(", *(f"            {argument}," for argument in arguments), "        ),"]


def _mapping(name: str, values: Mapping[str, Any]) -> Iterator[str]:
    if values:
        yield f"    {name} = {{"
        for key, value in values.items():
            text = dumps(value) if isinstance(value, str) else repr(value)
            line = f'        "{key}": {text},'
            if len(line) <= WIDTH:
                yield line
            else:
                wrapped = fill(value, WIDTH - 18, drop_whitespace=False).split("\n")
                yield f'        "{key}": ('
                yield from (f"            {dumps(piece)}" for piece in wrapped)
                yield "        ),"
        yield "    }"
