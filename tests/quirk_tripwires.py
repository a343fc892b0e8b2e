"""Check that the catalog of quirks is complete, and that upstream still behaves as it states."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import requires
from typing import get_args

from packaging.requirements import Requirement
from packaging.version import Version

from nrl_models.common.switches import SWITCHES
from nrl_models.quirks import Quirk
from nrl_models.quirks.quirk import ProbeKind, QuirkStage, installed, is_met
from tests.quirk_removals import REMOVE


class CatalogError(Exception):
    """The catalog of quirks is incomplete or wrong."""


class QuirkExpiredError(Exception):
    """Upstream has changed, but the catalog has not."""


def tripwire(quirk: Quirk, shows: bool | None, of: str = "upstream") -> None:
    """Fail if upstream has changed.

    Args:
        quirk: The quirk.
        shows: Result of the probe. None if it did not run.
        of: The subject of the probe.

    Raises:
        QuirkExpiredError: The quirk is gone, so its handling should be deleted; or it is back.
    """
    asked, removed = quirk.asks or quirk.symptom, REMOVE.get(quirk.name, "its handling")
    if quirk.fixed and is_met(quirk.fixed, lowest_version) and not quirk.kept_for:
        raise QuirkExpiredError(
            f"{quirk.name}: every version this package takes satisfies {quirk.fixed}. Delete {removed}, and the "
            "entry; or say in the entry whom it is kept for."
        )
    is_introduced = not quirk.since or is_met(quirk.since, installed)
    if shows is False and not quirk.fixed and is_introduced:
        raise QuirkExpiredError(
            f"{quirk.name}: it is no longer so that {asked}; asked of {of}. "
            f"Upstream has fixed it. Delete {removed}; and the entry, if that was the last. Or give the "
            "release as its `fixed`, as long as older ones are supported."
        )
    if shows and quirk.is_fixed:
        raise QuirkExpiredError(f"{quirk.name} is said to be fixed in {quirk.fixed}, but {of} has it again: {asked}.")


def lowest_version(package: str) -> str | None:
    """Return the lowest version of `package` that nrl_models supports. None if it is not declared."""
    for line in requires("nrl_models") or ():
        requirement = Requirement(line)
        bounds = [bound.version for bound in requirement.specifier if bound.operator in (">=", "==", "~=")]
        if requirement.name == package and bounds:
            return max(bounds, key=Version)
    return None


def check_catalog(quirks: Iterable[Quirk]) -> None:
    """Check that every entry has all required fields.

    Raises:
        CatalogError: Lists everything that is missing or wrong.
    """
    problems: list[str] = []
    seen: set[str] = set()
    for quirk in quirks:
        wrong = list(_problems_of(quirk))
        if quirk.name in seen:
            wrong.append("is in the catalog twice")
        seen.add(quirk.name)
        problems += [f"{quirk.name}: {problem}" for problem in wrong]
    if unknown := sorted(SWITCHES - seen):
        problems.append(f"{', '.join(unknown)}: can be switched off, but the catalog does not say what it is")
    if problems:
        raise CatalogError(
            "the catalog of quirks is not whole:\n" + "\n".join(f"  - {problem}" for problem in problems)
        )


def _problems_of(quirk: Quirk) -> Iterable[str]:
    if not quirk.probe and not quirk.fixed:
        yield "has neither a probe nor a version bound, so nobody would notice that it is gone"
    if quirk.probe:
        if not quirk.asks:
            yield "has a probe that asks nothing"
        if quirk.probe not in get_args(ProbeKind):
            yield f"has a probe of kind {quirk.probe!r}: expected one of {', '.join(filter(None, get_args(ProbeKind)))}"
    for what, release in (("fixed", quirk.fixed), ("introduced", quirk.since)):
        try:
            Requirement(release or "transformers")
        except ValueError as error:
            yield f"is {what} in {release!r}, which is not a requirement: {error}"
    if not quirk.where or set(quirk.where) - {*get_args(QuirkStage)}:
        yield f"acts at {', '.join(quirk.where) or 'no place'}: expected some of {', '.join(get_args(QuirkStage))}"
    for field in ("symptom", "handling", "switch"):
        if not getattr(quirk, field):
            yield f"has no {field}"
    if not quirk.code:
        yield "does not say where it is handled"
    if quirk.off and quirk.name in SWITCHES:
        yield "has a switch of its own and says another way (`off`)"
