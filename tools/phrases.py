"""List phrases that this project's English avoids: `python -m tools.phrases`. Part of `make lint`.

Scans README.md, CONTRIBUTING.md, CHANGELOG.md, docs/ outside code fences, and docstrings, comments and messages of
`nrl_models/` and `tools/`. Exits with status 1 if it lists any.
"""

from __future__ import annotations

import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

PHRASES = {
    r"(?:^|[.;:] |\()(?:What|Who|Those|That which|Whatever|Whichever) [a-z][^?]*$": "start with the noun",
    r"\b(?:says|gives|takes|shows|finds|knows|tells|does|of|for|to|by|in|with|from|as) what\b": "name the thing",
    r"\b(?:of|in a process of) (?:its|their|his) own\b": "separate, dedicated, or nothing",
    r"\b(?:beside|likewise|meanwhile|anew|thereby|whichever|whatsoever|wherever|hitherto)\b": "next to, also, ...",
    r", too\b(?=[,.;:)]|$)": "also",
    r"\bto blame\b": "wrong, the source of the mismatch",
    r"\bh[eo]ld against\b": "compare with",
    r"\b(?:come|comes|came|coming|taken|takes) along\b": "included, bundled",
    r"\bmade up\b": "synthetic, invented",
    r"\b(?:is|are|was|were) told\b": "name the error, or who passes it",
    r"\bwhat came of\b|\bas it stands\b|\bwithout a word\b|\bparts? company\b|\bsees? to it\b": "no idioms",
}
"""Pattern, and what to write."""

GENERATED = ("docs/model-coverage/", "docs/engine-coverage.md", "docs/engine-coverage/", "docs/onboarding-reach.md")


def prose_of_python(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line number and text of comments, docstrings and messages."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and " " in token.string):
            for offset, line in enumerate(token.string.splitlines()):
                yield token.start[0] + offset, line.strip("# \"'")


def prose_of_markdown(text: str) -> Iterator[tuple[int, str]]:
    """Yield the line number and text of lines outside code fences, without inline code."""
    in_code = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            in_code = not in_code
        elif not in_code:
            yield number, re.sub(r"`[^`]*`", "`x`", line)


def findings(name: str, text: str) -> Iterator[str]:
    """Yield one line per phrase in a file."""
    for number, line in prose_of_markdown(text) if name.endswith(".md") else prose_of_python(text):
        for pattern, advice in PHRASES.items():
            if match := re.search(pattern, line):
                yield f"{name}:{number}: {match.group(0)!r}: write {advice}"


def main() -> int:
    """List all phrases. Returns the exit status."""
    names = subprocess.check_output(["git", "ls-files", "*.md", "nrl_models/*.py", "tools/*.py"], text=True).split()
    names = [name for name in names if not name.startswith(GENERATED) and name != "tools/phrases.py"]
    if not names:
        print("no files: run this in a checkout of the repository", file=sys.stderr)
        return 2
    lines = [line for name in names for line in findings(name, Path(name).read_text(encoding="utf-8"))]
    print("\n".join(lines) or f"no such phrase in {len(names)} files")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
