"""Check that names imported by nrl_models exist in a wheel, without importing the package."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tools.release_check.findings import Finding, Kind, Phase
from tools.release_check.upstream_code.our_code import imported_names, modules_of
from tools.release_check.upstream_code.sources import Sources

TORCH_LIST = "tools/release_check/upstream_code/private_attributes.py"
"""The list of private attributes in the checkout."""

TORCH_MODULE = "nrl_models/common/upstream_torch.py"
"""Module with attributes of wrappers, in older checkouts with all private attributes, in the oldest with none."""


def missing_names(checkout: Path, package: str, sources: Sources) -> Iterator[Finding]:
    """Find names that the checkout imports from a package and that its sources lack.

    Args:
        checkout: A checkout of nrl_models.
        package: Import name.
        sources: The package's sources.
    """
    places: dict[tuple[str, str], list[str]] = defaultdict(list)
    for imported in imported_names(checkout, package):
        places[imported.module, imported.name].append(imported.place)
    for (module, name), where in sorted(places.items()):
        if not _exists(sources, module, name):
            yield _finding(sources, module, name, f"imported in {', '.join(where)}")


def missing_torch_attributes(checkout: Path, sources: Sources) -> Iterator[Finding]:
    """Find private attributes of torch's classes that the checkout lists and that the sources lack."""
    for file, module, class_name, name in _listed_attributes(checkout):
        present = sources.mentions(module, class_name, name) if class_name else sources.has_name(module, name)
        if not present:
            yield _finding(sources, module, f"{class_name}.{name}".strip("."), f"listed in {file}")


def _exists(sources: Sources, module: str, name: str) -> bool:
    if not name:
        return sources.file_of(module) is not None or sources.has_name(*_split(module))
    return sources.has_name(module, name)


def _split(module: str) -> tuple[str, str]:
    parent, _, name = module.rpartition(".")
    return parent, name


def _finding(sources: Sources, module: str, name: str, place: str) -> Finding:
    return Finding(
        Phase.SIGNATURES,
        Kind.MISSING_NAME,
        f"{module}:{name}",
        name,
        functions=(f"{module}:{name}",),
        item=f"name {module}:{name}",
        message=f"{module} of {sources.label} has no {name}; {place}",
    )


def _listed_attributes(checkout: Path) -> Iterator[tuple[str, str, str, str]]:
    """Yield file, module, class and name of each listed attribute, without importing the lists."""
    tree = modules_of(checkout).get(TORCH_MODULE)
    for node in ast.walk(tree) if tree else ():
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "PrivateAttribute":
            module, class_name, name = map(ast.literal_eval, node.args)
            yield TORCH_MODULE, module, class_name, name
    if (file := checkout / TORCH_LIST).is_file():
        assigned = (node for node in ast.parse(file.read_text(encoding="utf-8")).body if isinstance(node, ast.Assign))
        for (module, class_name), names in ast.literal_eval(next(assigned).value).items():
            for name in names:
                yield TORCH_LIST, module, class_name, name
