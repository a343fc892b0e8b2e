"""Print the versions of installed packages as JSON; the first of several on the path counts."""

from __future__ import annotations

import json
from importlib.metadata import distributions


def installed() -> dict[str, str]:
    """Versions by name in lower case."""
    found: dict[str, str] = {}
    for distribution in distributions():
        found.setdefault(distribution.name.lower().replace("_", "-"), distribution.version)
    return found


if __name__ == "__main__":
    print(json.dumps(installed()))
