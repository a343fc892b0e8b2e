"""Print the versions of installed packages as JSON. If a package occurs twice on the path, the first one counts."""

from __future__ import annotations

import json
from importlib.metadata import distributions


def installed() -> dict[str, str]:
    """Return versions by lowercase name."""
    found: dict[str, str] = {}
    for distribution in distributions():
        found.setdefault(distribution.name.lower().replace("_", "-"), distribution.version)
    return found


if __name__ == "__main__":
    print(json.dumps(installed()))
