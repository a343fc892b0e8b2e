"""Private names in the sources of nrl_models."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import nrl_models

PACKAGE = Path(nrl_models.__path__[0])
ACCESSORS = frozenset({"getattr", "hasattr", "setattr", "delattr"})


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@cache
def trees() -> dict[str, ast.Module]:
    """Return the syntax tree of every module, by its path in the package."""
    files = sorted(PACKAGE.rglob("*.py"))
    return {file.relative_to(PACKAGE).as_posix(): ast.parse(file.read_text(encoding="utf-8")) for file in files}


def dotted(node: ast.expr) -> str:
    """Return the dotted name of an expression, such as `torch.utils._pytree`, or an empty string."""
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return node.id if isinstance(node, ast.Name) else ""


def private_attributes(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and name of private attributes that a module uses, also by `getattr` and its relatives."""
    for node in ast.walk(tree):
        name = ""
        if isinstance(node, ast.Attribute):
            name = node.attr
        elif isinstance(node, ast.Call) and dotted(node.func) in ACCESSORS and len(node.args) > 1:
            name = str(node.args[1].value) if isinstance(node.args[1], ast.Constant) else ""
        if is_private(name):
            yield getattr(node, "lineno", 0), name


@cache
def own_names() -> frozenset[str]:
    """Return names of functions and classes of nrl_models, of class attributes, and of attributes set on `self`."""
    found: set[str] = set()
    for tree in trees().values():
        for node in ast.walk(tree):
            found.add(getattr(node, "name", "") or "")
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and dotted(node.value) == "self":
                found.add(node.attr)
            if isinstance(node, ast.ClassDef):
                assigned = (part for part in node.body if isinstance(part, ast.Assign))
                found.update(dotted(target) for part in assigned for target in part.targets)
    return frozenset(found)
