"""All private names of torch are used in `nrl_models.common.upstream_torch`, and exist."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import nn

import nrl_models
from nrl_models.common import upstream_torch
from nrl_models.common.upstream_torch import PRIVATE_ATTRIBUTES, WRAPPERS, PrivateAttribute

PACKAGE = Path(nrl_models.__path__[0])
OBJECTS = (torch.ones(1), torch.ones(1).untyped_storage(), nn.Linear(1, 1), torch.ops.aten.add.Tensor)
"""An instance of each class whose private attributes may be used."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def dotted(node: ast.expr) -> str:
    """Return the dotted name of an expression, such as `torch.utils._pytree`, or an empty string."""
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return node.id if isinstance(node, ast.Name) else ""


def private_names(text: str) -> Iterator[str]:
    """Return the private names of torch that a module imports or reads from a torch module."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            names = [dotted(node)] if isinstance(node, ast.Attribute) else []
        for name in names:
            if name.startswith("torch.") and any(map(is_private, name.split("."))):
                yield name


def test_private_names_are_used_in_one_module() -> None:
    listed = {f"torch.{attribute.class_name}.{attribute.name}" for attribute in PRIVATE_ATTRIBUTES}
    listed |= {"torch.Tensor._make_wrapper_subclass"}
    uses = [
        f"{file.relative_to(PACKAGE)}: {name}"
        for file in sorted(PACKAGE.rglob("*.py"))
        if file != Path(upstream_torch.__file__)
        for name in private_names(file.read_text())
        if name not in listed
    ]
    assert not uses, "\n".join(["import these from nrl_models.common.upstream_torch:", *uses])


@pytest.mark.parametrize(
    "text",
    [
        "from torch.utils._pytree import tree_map",
        "from torch.overrides import _private",
        "import torch.utils._device",
        "import torch\nstate = torch._C._get_tracing_state()",
    ],
)
def test_private_names_detects_imports_and_attributes(text: str) -> None:
    assert list(private_names(text))


def test_private_attributes_are_listed() -> None:
    """Private attributes of torch objects that are not defined by a module of nrl_models."""
    texts = {file: ast.parse(file.read_text()) for file in PACKAGE.rglob("*.py")}
    own_names = {
        name
        for tree in texts.values()
        for node in ast.walk(tree)
        for name in (getattr(node, "name", ""), *_stored_on_self(node))
    }
    listed = {object_.name for object_ in PRIVATE_ATTRIBUTES}
    missing = {
        f"{file.relative_to(PACKAGE)}:{node.lineno}: {node.attr}"
        for file, tree in texts.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and is_private(node.attr)
        and node.attr not in own_names | listed
        and any(hasattr(object_, node.attr) for object_ in OBJECTS)
    }
    assert not missing, f"add to PRIVATE_ATTRIBUTES: {sorted(missing)}"


def _stored_on_self(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and dotted(node.value) == "self":
        yield node.attr


@pytest.mark.parametrize("attribute", PRIVATE_ATTRIBUTES, ids=lambda attribute: attribute.name)
def test_listed_attribute_is_used(attribute: PrivateAttribute) -> None:
    import_module(attribute.module)
    users = [file for file in PACKAGE.rglob("*.py") if attribute.name in file.read_text()]
    assert len(users) > 1 or attribute in WRAPPERS, "remove it from PRIVATE_ATTRIBUTES"
