"""Print the subjects of a checkout's release check as JSON: the family of each architecture, and the quick suite."""

from __future__ import annotations

import json
from importlib import import_module
from typing import Any

from nrl_models import registry
from tools.variants import with_variants


def subjects() -> dict[str, Any]:
    """Return `{"families": {architecture: family}, "quick": [architecture of each pattern]}`."""
    families = {name: family for family, names in registry.FAMILIES.items() for name in with_variants(names)}
    patterns = import_module("tests.patterns").ONE_OF_EACH_PATTERN
    return {"families": families, "quick": [registry.FAMILIES[family][0] for family in patterns]}


if __name__ == "__main__":
    print(json.dumps(subjects()))
