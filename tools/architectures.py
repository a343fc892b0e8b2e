"""Check architecture names on the command line."""

from __future__ import annotations

from collections.abc import Iterable

from nrl_models import registry
from nrl_models.errors import UnknownArchitectureError, did_you_mean


def require_registered(names: Iterable[str], *, aliases: bool = True) -> None:
    """Check that every name is a registered architecture.

    Raises:
        UnknownArchitectureError: Lists the names that are not, each with the nearest registered name.
    """
    known = registry.architectures(aliases=aliases)
    if unknown := [f"{name}{did_you_mean(name, known)}" for name in names if name not in known]:
        raise UnknownArchitectureError(f"no family serves {', '.join(unknown)}")
