"""Model families: one folder for a family, or a row of the table for those that need nothing else said.

Importing this imports no model: `nrl_models.registry` reads it.
"""

from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from nrl_models.families.facts import Family


@cache
def folders() -> dict[str, Family]:
    """The families with a folder of their own, by its name."""
    packages = sorted(found.name for found in iter_modules(__path__) if found.ispkg and found.name != "table")
    return {name: import_module(f"{__name__}.{name}").FAMILY for name in packages}


def module_of(family: str) -> str:
    """The name of the module that has a family's classes."""
    return f"{__name__}.{family}.model" if family in folders() else f"{__name__}.table.classes"
