"""Select architectures for the generated tests of `make test`: one family of each pattern, and changed families.

`make test-all` (`pytest --all-families`) runs them for all architectures. With `--share N`, HEAD selects one N-th of
the other architectures and of the long tests, so that successive commits run all of them.
"""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterable
from pathlib import Path
from zlib import crc32

from patterns import ONE_OF_EACH_PATTERN

from nrl_models import registry

ROOT = Path(__file__).parents[1]
FAMILIES = "nrl_models/families/"
TABLE = f"{FAMILIES}table"
ALSO = ("baichuan", "gemma4", "kimi_vl", "nemotron_h", "qwen2_5_vl", "qwen3_5")
"""Patterns of `ONE_OF_EACH_PATTERN` left to longer runs: images, audio, states, custom code."""


def chosen() -> list[str]:
    """Return the selected architectures, in the registry's order."""
    complete_families = {ONE_OF_EACH_PATTERN[0], *changed()}  # with classifiers
    wanted = {architecture for family in complete_families for architecture in registry.FAMILIES.get(family, ())}
    wanted |= {registry.FAMILIES[family][0] for family in (*ONE_OF_EACH_PATTERN, *ALSO)}
    return [architecture for architecture in registry.architectures(aliases=False) if architecture in wanted]


def others() -> list[str]:
    """Return the architectures that `chosen` does not select."""
    left = set(chosen())
    return [architecture for architecture in registry.architectures(aliases=False) if architecture not in left]


def share_of(names: Iterable[str], parts: int) -> list[str]:
    """Return one of `parts` shares of architectures or tests. HEAD selects it."""
    selected = int(git("rev-parse", "--short=8", "HEAD").strip() or "0", 16) % parts
    return [name for name in names if crc32(name.encode()) % parts == selected]


def changed() -> set[str]:
    """Return the families whose folder or table row differs from the main branch, or else from HEAD."""
    base = git("merge-base", "HEAD", "origin/main").strip() or "HEAD"
    files = git("diff", "--name-only", base, "--", FAMILIES).splitlines()
    files += git("ls-files", "--others", "--exclude-standard", "--", FAMILIES).splitlines()
    found = {file.removeprefix(FAMILIES).partition("/")[0] for file in files}
    was = git("ls-tree", "-r", "--name-only", base, "--", FAMILIES).splitlines()
    before = rows_in(git("show", f"{base}:{file}") for file in was if file.endswith(".py"))
    now = rows_in(file.read_text() for file in (ROOT / TABLE).glob("*.py"))
    return found | {name for name, row in now.items() if before.get(name) != row}


def rows_in(sources: Iterable[str]) -> dict[str, str]:
    """Return the rows of the table in Python files, by family: the arguments of each."""
    return {
        key.value: " ".join(map(ast.unparse, [*value.args, *value.keywords]))
        for source in sources
        for table in ast.walk(ast.parse(source))
        if isinstance(table, ast.Dict)
        for key, value in zip(table.keys, table.values, strict=True)
        if isinstance(key, ast.Constant) and isinstance(value, ast.Call)
    }


def git(*arguments: str) -> str:
    """Return the output of git. Empty outside of a git checkout."""
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout if done.returncode == 0 else ""
