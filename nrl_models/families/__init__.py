"""Model families: a package per family, or a row of the table for families that only fuse linears.

Importing this package imports no model. `nrl_models.registry` reads it.
"""

from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from nrl_models.families.facts import Family

__all__ = ["folders", "module_of"]


@cache
def folders() -> dict[str, Family]:
    """Return the families with a separate package, by its name."""
    packages = sorted(module.name for module in iter_modules(__path__) if module.ispkg and module.name != "table")
    return {name: import_module(f"{__name__}.{name}").FAMILY for name in packages}


def module_of(family: str) -> str:
    """Return the name of the module with a family's classes."""
    return f"{__name__}.{family}.model" if family in folders() else f"{__name__}.table.classes"
