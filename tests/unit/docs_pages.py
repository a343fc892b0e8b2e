"""Read documentation pages: code blocks, shell commands and names."""

from __future__ import annotations

import ast
import builtins
import re
import shlex
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import typer

from nrl_models.cli import app

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    str(path.relative_to(ROOT))
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/*.md"), *ROOT.glob("examples/*.md")]
)
"""Pages with commands and snippets of this repository. Pages of families are generated."""

SHELLS = ("console", "bash")
SOURCES = ("nrl_models", "tests", "tools", "benchmarks", "examples")


def blocks(page: str, *languages: str) -> list[str]:
    """Return the code blocks of a page in these languages, in order."""
    pattern = rf"^```(?:{'|'.join(languages)})\n(.*?)^```$"
    return re.findall(pattern, (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


def block_with(page: str, text: str) -> str:
    """Return the only Python block of a page that contains `text`."""
    (match,) = [block for block in blocks(page, "python") if text in block]
    return match


def inline_code(page: str) -> list[str]:
    """Return the code spans of a page that are outside of code blocks."""
    text = re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    return [" ".join(span.split()) for span in re.findall(r"(?<!`)`([^`]+)`(?!`)", text)]


def shell_lines(page: str) -> list[str]:
    """Return the commands of a page: lines of shell blocks without their prompt, and code spans."""
    lines: list[str] = []
    for block in blocks(page, *SHELLS):
        for line in block.replace("\\\n", " ").splitlines():
            if line.startswith("$ "):
                lines.append(line[2:])
            elif not block.startswith("$ "):  # a script, without prompts and output
                lines.append(line)
    return [*lines, *inline_code(page)]


class CommandLine(NamedTuple):
    """A call of `nrl-models`: its command, for example `diagnose embeddings`, and its arguments."""

    command: str
    arguments: list[str]


def command_lines(page: str) -> Iterator[CommandLine]:
    """Find the calls of `nrl-models` in a page's shell blocks and code spans.

    A code span may omit the program name: `demo --break`.
    """
    for line in shell_lines(page):
        for part in re.split(r"&&|\||;", line):
            try:
                words = shlex.split(part, comments=True)
            except ValueError:  # a quote that ends in another part
                continue
            start = next((place for place, word in enumerate(words) if word.split("/")[-1] == "nrl-models"), None)
            if start is not None:
                yield _command_line(words[start + 1 :])
            elif len(words) > 1 and words[0] in options_of_commands() and any(w.startswith("--") for w in words):
                yield _command_line(words)


def _command_line(words: list[str]) -> CommandLine:
    known = options_of_commands()
    for length in (2, 1):
        if (name := " ".join(words[:length])) in known and len(words) >= length:
            return CommandLine(name, words[length:])
    named = bool(words) and not words[0].startswith("-")
    return CommandLine(words[0] if named else "", words[1:] if named else words)


@cache
def options_of_commands() -> dict[str, set[str]]:
    """Return the options of each command of `nrl-models`. Options of the program itself have an empty name."""
    command = typer.main.get_command(app)
    found = {"": _options(command)}
    for name, child in command.commands.items():  # type: ignore[attr-defined]
        found[name] = _options(child)
        for below, grandchild in getattr(child, "commands", {}).items():
            found[f"{name} {below}"] = _options(grandchild)
    return found


def _options(command: Any) -> set[str]:
    named = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    return {option for option in named if option.startswith("-")} | {"--help", "-h"}


def make_targets(text: str) -> set[str]:
    """Return the targets of a Makefile."""
    return set(re.findall(r"^([a-z][a-z-]*):", text, re.MULTILINE))


def resolves(name: str) -> bool:
    """Return True if a dotted name is a module of this package, or an attribute of one.

    Modules whose requirements are not installed are read instead of imported.
    """
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        module = ".".join(parts[:length])
        if _file(module) is None:
            continue
        rest = parts[length:]
        try:
            value: Any = import_module(module)
        except ImportError:
            return not rest or rest[0] in _top_level_names(module)
        for attribute in rest:
            if not hasattr(value, attribute):
                return False
            value = getattr(value, attribute)
        return True
    return False


def _file(module: str) -> Path | None:
    base = ROOT.joinpath(*module.split("."))
    return next((path for path in (base.with_suffix(".py"), base / "__init__.py") if path.is_file()), None)


def _top_level_names(module: str) -> set[str]:
    path = _file(module)
    assert path is not None
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def imported_names(code: str) -> Iterator[tuple[str, str]]:
    """Return the imports of a snippet: the name in the snippet, and its dotted name."""
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.asname or alias.name.split(".")[0], alias.name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


def dotted_names(code: str) -> set[str]:
    """Return the dotted names that a snippet reads, with imported names expanded."""
    meanings = dict(imported_names(code))
    return {
        re.sub(r"^\w+", lambda match: meanings[match[0]], text, count=1)
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Attribute | ast.Name)
        and re.fullmatch(r"\w+(\.\w+)*", text := ast.unparse(node))
        and text.split(".")[0] in meanings
    }


def defined_names(code: str) -> set[str]:
    """Return the names that a snippet imports, defines or assigns."""
    names = {name for name, _ in imported_names(code)}
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def class_names_read(code: str) -> set[str]:
    """Return the capitalized names that a snippet reads, without those of Python."""
    return {
        node.id
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Name)
        and isinstance(node.ctx, ast.Load)
        and re.match(r"[A-Z]\w*[a-z]", node.id)
        and not hasattr(builtins, node.id)
    }


@cache
def words_of_sources() -> frozenset[str]:
    """Return every identifier in the Python files and configuration of this repository."""
    files = [path for folder in SOURCES for path in (ROOT / folder).rglob("*.py") if path.name != "test_docs.py"]
    files += [ROOT / "pyproject.toml", ROOT / "docs" / "model-coverage" / "index.md"]
    return frozenset(word for file in files for word in re.findall(r"[A-Za-z_]\w*", file.read_text()))


def installed(name: str) -> bool:
    """Return True if the package of a dotted name is installed."""
    return find_spec(name.split(".")[0]) is not None
