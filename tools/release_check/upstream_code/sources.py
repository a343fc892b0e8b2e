"""Python sources of a package, read from a wheel or a folder without importing them."""

from __future__ import annotations

import ast
import difflib
import zipfile
from functools import cached_property, lru_cache
from pathlib import Path, PurePosixPath

import httpx2
from packaging.version import Version

from nrl_models.errors import one_line
from tools.release_check.errors import NoIndexError
from tools.release_check.packages import index

LARGEST_DOWNLOAD = 100 << 20
"""Maximum size in bytes of wheels that are downloaded. From larger wheels only the required members are fetched."""

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class Sources:
    """The sources of one version of a package.

    Args:
        label: Readable name: `transformers 5.24.0`.
        root: A wheel open for reading, or the folder that contains the package.
        package: The only folder in it to read. If empty, all.
    """

    def __init__(self, label: str, root: zipfile.ZipFile | Path, package: str = "") -> None:
        self.label = label
        self._root = root
        self._package = package
        self._trees: dict[str, ast.Module | None] = {}
        self._texts: dict[str, str | None] = {}
        self._names: dict[str, tuple[set[str], list[str]]] = {}

    @cached_property
    def files(self) -> frozenset[str]:
        """Paths of all files."""
        if isinstance(self._root, Path):
            paths = (path for path in (self._root / self._package).rglob("*.py*") if path.suffix in (".py", ".pyi"))
            return frozenset(path.relative_to(self._root).as_posix() for path in paths)
        return frozenset(self._root.namelist())

    def file_of(self, module: str) -> str | None:
        """Return the file of a module, or a stub if the module is compiled. None if there is neither."""
        base = module.replace(".", "/")
        candidates = (f"{base}.py", f"{base}/__init__.py", f"{base}.pyi", f"{base}/__init__.pyi")
        return next((path for path in candidates if path in self.files), None)

    def parsed(self, module: str) -> ast.Module | None:
        """Return a module's syntax tree. None if the module does not exist or cannot be parsed."""
        if module not in self._trees:
            text = self.module_text(module)
            try:
                self._trees[module] = ast.parse(text) if text is not None else None
            except SyntaxError:
                self._trees[module] = None
        return self._trees[module]

    def module_text(self, module: str) -> str | None:
        """Return the source of a module. None if it does not exist."""
        if module not in self._texts:
            file = self.file_of(module)
            self._texts[module] = self._read(file) if file else None
        return self._texts[module]

    def node(self, module: str, qualname: str) -> Function | None:
        """Return the definition of a function or class in a module. None if it does not exist."""
        if (parsed := self.parsed(module)) is None:
            return None
        return _definitions(parsed).get(qualname)

    def text(self, module: str, qualname: str) -> str | None:
        """Return the source of a function or class with its decorators. None if it does not exist."""
        node = self.node(module, qualname)
        if node is None:
            return None
        lines = (self.module_text(module) or "").splitlines()
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        return "\n".join(lines[first - 1 : node.end_lineno])

    def method(self, module: str, class_name: str, name: str) -> Function | None:
        """Return the definition of a method, from the class itself or the nearest base class in the package."""
        found = self.node(module, f"{class_name}.{name}")
        if found is not None:
            return found
        owner = self.node(module, class_name)
        for base in owner.bases if isinstance(owner, ast.ClassDef) else ():
            if (place := self._resolved(module, base)) and (found := self.method(*place, name)):
                return found
        return None

    def has_name(self, module: str, name: str) -> bool:
        """Return True if a module defines or imports a name, or has a submodule of that name."""
        if self.file_of(f"{module}.{name}"):
            return True
        text = self.module_text(module) or ""
        if name not in text and "import *" not in text:  # parsing takes much longer than reading
            return False
        names, stars = self._top_level(module)
        return name in names or any(self.has_name(star, name) for star in stars)

    def mentions(self, module: str, qualname: str, attribute: str) -> bool:
        """Return True if the source of a class defines, annotates, assigns or names (in a string) an attribute."""
        node = self.node(module, qualname)
        return node is not None and any(
            attribute in (getattr(part, "attr", ""), getattr(part, "name", ""), getattr(part, "id", ""))
            or (isinstance(part, ast.Constant) and part.value == attribute)
            for part in ast.walk(node)
        )

    def folders(self, under: str) -> set[str]:
        """Return the names of folders with Python files directly in a folder."""
        parts = PurePosixPath(under).parts
        paths = (PurePosixPath(file).parts for file in self.files)
        return {path[len(parts)] for path in paths if path[: len(parts)] == parts and len(path) > len(parts) + 1}

    def definitions(self, module: str) -> dict[str, str]:
        """Return the source of every function, method and class attribute of a module, by qualified name.

        Comments and docstrings are removed.
        """
        if (parsed := self.parsed(module)) is None:
            return {}
        found: dict[str, str] = {}
        for name, node in _definitions(parsed).items():
            if not isinstance(node, ast.ClassDef):
                found[name] = _normalized(node)
                continue
            for statement in node.body:
                if isinstance(statement, (ast.Assign, ast.AnnAssign)):
                    targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                    found |= {f"{name}.{ast.unparse(target)}": ast.unparse(statement) for target in targets}
        return found

    def absolute(self, module: str, node: ast.ImportFrom) -> str:
        """Return the full name of the module that an import in `module` refers to."""
        if not node.level:
            return node.module or ""
        parts = module.split(".")
        is_package = (self.file_of(module) or "").rpartition("/")[2].startswith("__init__.")
        kept = parts[: len(parts) - node.level + is_package]
        return ".".join([*kept, *filter(None, [node.module])])

    def _read(self, file: str) -> str:
        if isinstance(self._root, Path):
            return (self._root / file).read_text(encoding="utf-8")
        return self._root.read(file).decode("utf-8")

    def _resolved(self, module: str, base: ast.expr) -> tuple[str, str] | None:
        """Return the module and name of a base class."""
        if not isinstance(base, ast.Name):
            return None
        parsed = self.parsed(module)
        assert parsed is not None
        for node in parsed.body:
            if isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    if (alias.asname or alias.name) == base.id:
                        return self.absolute(module, node), alias.name
        return module, base.id

    def _top_level(self, module: str) -> tuple[set[str], list[str]]:
        """Return names that a module defines or imports, and the modules from which it imports all names."""
        if module not in self._names:
            tree = self.parsed(module) or ast.Module([], [])
            imports = (node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom))
            stars = [self.absolute(module, node) for node in imports if node.names[0].name == "*"]
            self._names[module] = _names(tree), stars
        return self._names[module]


@lru_cache(maxsize=64)
def sources_of(package: str, version: Version, folder: Path) -> Sources:
    """Return the sources of a release.

    Args:
        package: Name on the index.
        version: The release.
        folder: The folder for downloaded wheels.

    Raises:
        NoIndexError: The index does not respond.
        NoReleaseError: The release does not exist.
    """
    stored = sorted(folder.glob(f"{package.replace('-', '_')}-{version}-*.whl")) if folder.is_dir() else []
    label = f"{package} {version}"
    if stored:
        return Sources(label, zipfile.ZipFile(stored[0]))
    wheel = index.wheel(package, version)
    if wheel.size > LARGEST_DOWNLOAD:
        return Sources(label, zipfile.ZipFile(index.RemoteFile(wheel.url, wheel.size)))
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / wheel.url.rpartition("/")[2]
    part = target.with_suffix(".part")
    try:
        with httpx2.stream("GET", wheel.url, timeout=index.SECONDS, follow_redirects=True) as response:
            response.raise_for_status()
            with part.open("wb") as file:
                for chunk in response.iter_bytes():
                    file.write(chunk)
    except httpx2.HTTPError as error:
        raise NoIndexError(f"{wheel.url}: {one_line(error)}") from error
    part.rename(target)
    return Sources(label, zipfile.ZipFile(target))


def function_diff(before: Sources, after: Sources, module: str, qualname: str) -> str:
    """Return the unified diff of a function or class between two versions. Empty if it is the same or in neither."""
    old, new = before.text(module, qualname) or "", after.text(module, qualname) or ""
    names = f"{before.label}: {module}.{qualname}", f"{after.label}: {module}.{qualname}"
    return "\n".join(difflib.unified_diff(old.splitlines(), new.splitlines(), *names, lineterm=""))


def changed_functions(before: Sources, after: Sources, module: str) -> tuple[str, ...]:
    """Return qualified names of functions and class attributes of a module whose code differs, ignoring comments."""
    old, new = before.definitions(module), after.definitions(module)
    return tuple(sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name)))


def imported_modules(sources: Sources, module: str, package: str) -> set[str]:
    """Return the modules of a package that a module imports from."""
    parsed = sources.parsed(module)
    if parsed is None:
        return set()
    nodes = (node for node in ast.walk(parsed) if isinstance(node, ast.ImportFrom))
    found = {sources.absolute(module, node) for node in nodes}
    return {name for name in found if name.split(".")[0] == package}


def _definitions(tree: ast.Module) -> dict[str, Function]:
    found: dict[str, Function] = {}

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, Function):
                found[f"{prefix}{node.name}"] = node
                if isinstance(node, ast.ClassDef):
                    visit(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, (ast.If, ast.Try, ast.With)):
                for part in ("body", "orelse", "finalbody"):
                    visit(getattr(node, part, []), prefix)

    visit(tree.body, "")
    return found


def _names(tree: ast.Module) -> set[str]:
    """Yield names that a module defines or imports outside of functions and classes."""
    found: set[str] = set()

    def visit(body: list[ast.stmt]) -> None:
        for node in body:
            if isinstance(node, Function):
                found.add(node.name)
                continue
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                found.update((alias.asname or alias.name).split(".")[0] for alias in node.names)
            if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.For)):
                found.update(part.id for part in ast.walk(node) if isinstance(part, ast.Name))
                found.update(_strings_in_dicts(node))
            for part in ("body", "orelse", "finalbody"):
                visit(getattr(node, part, []))
            for handler in getattr(node, "handlers", []):
                visit(handler.body)

    visit(tree.body)
    return found


def _strings_in_dicts(node: ast.AST) -> set[str]:
    """Yield names in a table such as `{"module": ["Class"]}`, from which a package imports lazily."""
    tables = (part for part in ast.walk(node) if isinstance(part, ast.Dict))
    values = (part for table in tables for value in table.values for part in ast.walk(value))
    return {part.value for part in values if isinstance(part, ast.Constant) and isinstance(part.value, str)}


def _normalized(node: Function) -> str:
    """Return the code of a function as text, without comments, formatting and docstring."""
    text = ast.unparse(node)
    docstring = ast.get_docstring(node, clean=False)
    return text if docstring is None else ast.unparse(_without_docstring(ast.parse(text)))


def _without_docstring(tree: ast.Module) -> ast.Module:
    function = tree.body[0]
    assert isinstance(function, Function)
    function.body = function.body[1:] or [ast.Pass()]
    return tree
