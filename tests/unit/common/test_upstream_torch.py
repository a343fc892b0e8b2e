"""All private names of torch are used in `nrl_models.common.upstream_torch`, and exist."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.ao.nn import quantized
from torch.nn.utils import prune

from nrl_models.common import upstream_torch
from nrl_models.common.upstream_torch import WRAPPERS, PrivateAttribute
from tests.unit.common.source_names import PACKAGE, dotted, is_private, own_names, private_attributes, trees
from tools.release_check.upstream_code.private_attributes import PRIVATE_ATTRIBUTES

LISTED = [PrivateAttribute(*owner, name) for owner, names in PRIVATE_ATTRIBUTES.items() for name in names]

OBJECTS = (
    torch.ones(1),
    torch.ones(1).untyped_storage(),
    nn.Linear(1, 1),
    nn.Linear(1, 1).state_dict(),
    torch.ops.aten.add.Tensor,
    *prune.identity(nn.Linear(1, 1), "weight")._forward_pre_hooks.values(),
    *([quantized.Linear(1, 1)] if "fbgemm" in torch.backends.quantized.supported_engines else []),
)
"""An instance of each class whose private attributes may be used."""


def private_names(text: str) -> Iterator[str]:
    """Return the private names of torch that a module imports or reads from a torch module."""
    tree = ast.parse(text)
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    imported = {alias.asname or alias.name: f"{node.module}.{alias.name}" for node in imports for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            first, *rest = dotted(node).split(".") if isinstance(node, ast.Attribute) else [""]
            names = [".".join([imported.get(first, first), *rest])]
        for name in names:
            if name.startswith("torch.") and any(map(is_private, name.split("."))):
                yield name


def test_private_names_are_used_in_one_module() -> None:
    listed = {f"{attribute.module}.{attribute.class_name}.{attribute.name}" for attribute in LISTED}
    listed = {name.replace("..", ".") for name in listed} | {"torch.Tensor._make_wrapper_subclass"}
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
        "from torch import nn\nkind = nn.modules.dropout._DropoutNd",
    ],
)
def test_private_names_detects_imports_and_attributes(text: str) -> None:
    assert list(private_names(text))


def test_private_attributes_are_listed() -> None:
    """Private attributes of torch objects that are not defined by a module of nrl_models."""
    listed = {attribute.name for attribute in (*LISTED, *WRAPPERS)}
    missing = {
        f"{file}:{line}: {name}"
        for file, tree in trees().items()
        for line, name in private_attributes(tree)
        if name not in own_names() | listed and any(hasattr(object_, name) for object_ in OBJECTS)
    }
    assert not missing, f"add to PRIVATE_ATTRIBUTES: {sorted(missing)}"


def test_private_attributes_in_the_list_module_are_listed() -> None:
    listed = {attribute.name for attribute in (*LISTED, *WRAPPERS)} | {"_local_scalar_dense"}
    used = {name for _, name in private_attributes(trees()["common/upstream_torch.py"])}
    assert used <= listed


@pytest.mark.parametrize("attribute", LISTED, ids=lambda attribute: attribute.name)
def test_listed_attribute_is_used(attribute: PrivateAttribute) -> None:
    import_module(attribute.module)
    assert any(attribute.name in file.read_text() for file in PACKAGE.rglob("*.py")), "remove it from the list"


@pytest.mark.parametrize("wrapper", WRAPPERS, ids=lambda wrapper: wrapper.class_name)
def test_wrapper_exists(wrapper: PrivateAttribute) -> None:
    assert hasattr(import_module(wrapper.module), wrapper.class_name)
