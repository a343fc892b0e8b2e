"""Uses of other packages in the source of nrl_models, found without importing it."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Imported:
    """A name that a module imports from another package.

    Args:
        module: The other package's module.
        name: The name. Empty for `import module`.
        place: File and line in nrl_models.
    """

    module: str
    name: str
    place: str


@dataclass(frozen=True)
class Construction:
    """A call of an imported class with keywords.

    Args:
        module: The module that the class is imported from.
        name: The class.
        keywords: The keywords of the call.
        file: File of the call, relative to the checkout.
        place: File and line in nrl_models.
    """

    module: str
    name: str
    keywords: tuple[str, ...]
    file: str
    place: str


@cache
def modules_of(checkout: Path) -> dict[str, ast.Module]:
    """Return the syntax tree of every module of the checkout's nrl_models, by file."""
    files = sorted((checkout / "nrl_models").rglob("*.py"))
    return {file.relative_to(checkout).as_posix(): ast.parse(file.read_text(encoding="utf-8")) for file in files}


def imported_names(checkout: Path, package: str) -> list[Imported]:
    """Return names that nrl_models imports from a package, except those that may be missing in some versions."""
    found = []
    for file, tree in modules_of(checkout).items():
        for node in _unconditional(tree):
            if isinstance(node, ast.ImportFrom) and _is_of(node.module, package):
                assert node.module is not None
                found += [Imported(node.module, alias.name, f"{file}:{node.lineno}") for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names if _is_of(alias.name, package)]
                found += [Imported(name, "", f"{file}:{node.lineno}") for name in names]
    return found


def constructions(checkout: Path, package: str) -> Iterator[Construction]:
    """Return calls with keywords of names that are imported from a package, or of attributes of imported modules."""
    for call in imported_calls(checkout, (package,)):
        keywords = tuple(keyword.arg for keyword in call.node.keywords if keyword.arg)
        *modules, name = call.names
        if keywords and len(modules) < 2:
            yield Construction(".".join([call.module, *modules]), name, keywords, call.file, call.place)


@dataclass(frozen=True)
class ImportedCall:
    """A call of an imported name, or of an attribute of one.

    Args:
        module: The module that the name is imported from.
        names: The name, then attributes: `("AutoConfig", "register")`.
        node: The call.
        file: File of the call, relative to the checkout.
    """

    module: str
    names: tuple[str, ...]
    node: ast.Call
    file: str

    @property
    def place(self) -> str:
        """File and line in nrl_models."""
        return f"{self.file}:{self.node.lineno}"


def imported_calls(checkout: Path, modules: tuple[str, ...]) -> Iterator[ImportedCall]:
    """Return calls of names that are imported from these modules or from modules in them."""
    for file, tree in modules_of(checkout).items():
        origins: dict[str, tuple[str, ...]] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and _is_of(node.module, *modules):
                origins |= {alias.asname or alias.name: (node.module, alias.name) for alias in node.names}
            elif isinstance(node, ast.Import):
                names = [alias for alias in node.names if "." not in alias.name or alias.asname]
                origins |= {
                    alias.asname or alias.name: (alias.name,) for alias in names if _is_of(alias.name, *modules)
                }
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and (found := _origin(node.func, origins)) and len(found) > 1:
                yield ImportedCall(found[0], found[1:], node, file)


def _origin(function: ast.expr, origins: dict[str, tuple[str, ...]]) -> tuple[str, ...]:
    """Return the module of a called imported name, the name, and called attributes. Empty for other calls."""
    if isinstance(function, ast.Name):
        return origins.get(function.id, ())
    if isinstance(function, ast.Attribute) and (found := _origin(function.value, origins)):
        return (*found, function.attr)
    return ()


def keyword_calls(checkout: Path) -> dict[str, list[str]]:
    """Return files and lines of calls in nrl_models, by the keyword that they pass."""
    found: dict[str, list[str]] = defaultdict(list)
    for file, tree in modules_of(checkout).items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                for keyword in node.keywords:
                    if keyword.arg:
                        found[keyword.arg].append(f"{file}:{node.lineno}")
    return found


def _unconditional(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield nodes outside of `try: ... except ImportError` and `if TYPE_CHECKING`."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        if isinstance(node, ast.Try) and any(_catches_import_error(handler) for handler in node.handlers):
            waiting += [*node.orelse, *node.finalbody]
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting += node.orelse
        else:
            waiting += ast.iter_child_nodes(node)


def _catches_import_error(handler: ast.ExceptHandler) -> bool:
    caught = ast.unparse(handler.type) if handler.type else "Exception"
    return any(name in caught for name in ("ImportError", "ModuleNotFoundError", "Exception"))


def _is_of(module: str | None, *modules: str) -> bool:
    """Return True if a module is one of `modules`, or in one of them."""
    return module is not None and f"{module}.".startswith(tuple(f"{one}." for one in modules))
