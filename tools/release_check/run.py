"""Run a release check: resolve versions, create environments, run the phases, and group the findings."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.version import Version

from tools.release_check.errors import InstallError, NoReleaseError, ReleaseCheckError, SkippedPhaseError
from tools.release_check.findings import Cause, Finding, Kind, Phase, causes_of
from tools.release_check.outcome_files import source_digest
from tools.release_check.packages import index
from tools.release_check.packages.environments import make_environment, wheels_folder
from tools.release_check.packages.tested_versions import (
    NEWEST,
    PACKAGES,
    InstallGroup,
    requested_versions,
    tested_versions,
)
from tools.release_check.phases import PHASES, counts
from tools.release_check.subject import Subject
from tools.release_check.upstream_code.sources import LARGEST_DOWNLOAD, function_diff, sources_of

FOR_ENGINES = frozenset({Phase.SIGNATURES, Phase.SUITE})
"""Phases for an engine's environment. The other phases check the packages for training."""

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Request:
    """The options of a release check.

    Args:
        packages: `newest`, or `PACKAGE==VERSION`s.
        checkout: The repository whose nrl_models is checked.
        out: Folder for outcomes and the report.
        jobs: Number of parallel processes.
        phases: The phases to run.
        names: Architectures. If empty, all.
        full_torch: Install torch even if its wheel is large.
    """

    packages: tuple[str, ...]
    checkout: Path
    out: Path
    jobs: int
    phases: tuple[Phase, ...] = tuple(PHASES)
    names: tuple[str, ...] = ()
    full_torch: bool = False


@dataclass
class Report:
    """The result of a release check.

    Args:
        versions: Versions under test by package.
        tested: Versions that the checkout's constraints pin.
        names_only: Packages of which only the names were looked up.
        causes: The causes found.
        diffs: By function, the unified diff between the tested version and the one under test.
        errors: Checks that could not run, a line each.
        phases: Phases that ran, with the environment and the counts of outcomes.
        skipped: Phases with nothing to check, and the reason.
    """

    versions: Mapping[str, Version]
    tested: Mapping[str, Version]
    names_only: tuple[str, ...] = ()
    causes: list[Cause] = field(default_factory=list)
    diffs: dict[str, str] = field(default_factory=dict)
    errors: list[str] = field(default_factory=list)
    phases: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    @property
    def status(self) -> int:
        """The exit status: 1 with findings, else 2 if a check could not run, else 0."""
        return 1 if self.causes else 2 if self.errors else 0

    def to_json(self) -> dict[str, object]:
        """Return the content of `report.json`."""
        return {
            "versions": {name: str(version) for name, version in self.versions.items()},
            "tested": {name: str(version) for name, version in self.tested.items()},
            "names_only": list(self.names_only),
            "phases": self.phases,
            "skipped": self.skipped,
            "errors": self.errors,
            "causes": [cause.to_json() for cause in self.causes],
            "diffs": self.diffs,
        }


def release_check(request: Request, tell: Tell) -> Report:
    """Check releases.

    Args:
        request: The options.
        tell: Called with a progress message.

    Raises:
        ReleaseCheckError: The arguments are wrong, or no package can be checked.
    """
    require_checkout(request.checkout)
    tested = tested_versions(request.checkout)
    versions, errors = resolve(request.packages, tested, tell)
    if not versions and errors:
        raise ReleaseCheckError(*errors)
    if not versions:
        tell("no package has a release newer than its tested version")
    large = () if request.full_torch else _too_large(versions, tested)
    report = Report(versions, tested, large, errors=errors)
    request.out.mkdir(parents=True, exist_ok=True)
    findings: list[Finding] = []
    for group in InstallGroup:
        names = [name for name in versions if PACKAGES[name].group is group]
        if not names:
            continue
        try:
            subject, conflicts = _subject(request, group, {name: versions[name] for name in names}, large, tested)
            subject.require_known_names()
        except ReleaseCheckError as error:
            report.errors.append(str(error))
            continue
        findings += conflicts
        for phase in request.phases:
            if group is not InstallGroup.TRAINING and phase not in FOR_ENGINES:
                continue
            tell(f"{group}: {phase}")
            try:
                findings += PHASES[phase](subject)
                outcomes = counts(subject, phase)
                report.phases.append(f"{group}: {phase}" + (f" ({outcomes})" if outcomes else ""))
            except SkippedPhaseError as error:
                report.skipped.append(f"{group}: {phase}: {error}")
            except ReleaseCheckError as error:
                report.errors.append(str(error))
    report.causes = causes_of(findings)
    try:
        report.diffs = diffs_of(report.causes, versions, tested)
    except ReleaseCheckError as error:
        report.errors.append(f"no upstream diffs: {error}")
    return report


def require_checkout(folder: Path) -> None:
    """Check that a folder has nrl_models.

    Raises:
        ReleaseCheckError: It does not.
    """
    if not (folder / "nrl_models" / "__init__.py").is_file():
        raise ReleaseCheckError(f"{folder}: expected a checkout of nrl_models")


def resolve(
    arguments: Iterable[str], tested: Mapping[str, Version], tell: Tell
) -> tuple[dict[str, Version], list[str]]:
    """Return the versions to check, and a line for each package without one.

    Raises:
        NoIndexError: The index does not respond.
        ReleaseCheckError: An argument is wrong.
    """
    arguments = tuple(arguments)
    errors: list[str] = []
    if arguments != (NEWEST,):
        versions = requested_versions(arguments)
        for name, wanted in list(versions.items()):
            try:
                index.wheel(name, wanted)
            except NoReleaseError as error:
                errors.append(str(error))
                del versions[name]
        return versions, errors
    versions = {}
    for name in PACKAGES:
        try:
            newest = index.newest(name)
        except NoReleaseError as error:
            errors.append(str(error))
            continue
        known = tested.get(name)
        is_newer = known is None or newest > known
        tell(f"{name}: newest {newest}, tested {known or 'never'}{' (newer)' if is_newer else ''}")
        if is_newer:
            versions[name] = newest
    return versions, errors


def _too_large(versions: Mapping[str, Version], tested: Mapping[str, Version]) -> tuple[str, ...]:
    """Return packages under test that are not installed: torch, if the index has no CPU build of it."""
    wanted = versions.get("torch")
    is_installed = wanted is not None and _installed("torch") == wanted.public
    is_large = wanted is not None and index.wheel("torch", wanted).size > LARGEST_DOWNLOAD
    return ("torch",) if is_large and not is_installed and wanted != tested.get("torch") else ()


def _installed(package: str) -> str | None:
    try:
        return Version(version(package)).public
    except PackageNotFoundError:
        return None


def _subject(
    request: Request,
    group: InstallGroup,
    versions: Mapping[str, Version],
    large: tuple[str, ...],
    tested: Mapping[str, Version],
) -> tuple[Subject, list[Finding]]:
    """Create the environment for packages. Packages that cannot be installed with the first become findings.

    Raises:
        InstallError: The first package cannot be installed.
    """
    wanted = {name: found for name, found in versions.items() if name not in large}
    conflicts: list[Finding] = []
    torch = _installed("torch") if "torch" not in wanted else None
    pinned = {"torch": Version(torch)} if torch else {}
    try:
        environment = make_environment(wanted, request.checkout, pinned=pinned)
    except InstallError as error:
        if len(wanted) < 2:
            raise
        fitting: dict[str, Version] = {}
        for name, found in wanted.items():
            try:
                environment = make_environment(fitting | {name: found}, request.checkout, pinned=pinned)
            except InstallError as conflict:
                conflicts.append(_conflict(name, found, str(conflict)))
            else:
                fitting[name] = found
        if not fitting:
            raise error
        wanted = fitting
    out = request.out / f"{group}-{_fingerprint(environment.versions, request.checkout)}"
    out.mkdir(parents=True, exist_ok=True)
    judged = {name: found for name, found in versions.items() if name in wanted or name in large}
    subject = Subject(environment, judged, tested, frozenset(large), out, request.jobs, request.names)
    return subject, conflicts


def _conflict(name: str, wanted: Version, message: str) -> Finding:
    return Finding(Phase.REQUIREMENTS, Kind.CONFLICT, f"{name} {wanted}", "install", item=name, message=message)


def _fingerprint(versions: Mapping[str, Version], checkout: Path) -> str:
    """Return a hash of everything that influences outcomes, so that a run resumes only from equal ones."""
    folders = (checkout / name for name in ("nrl_models", "tests"))
    sources = source_digest(*(folder for folder in folders if folder.is_dir()))
    content = json.dumps([sorted((name, str(found)) for name, found in versions.items()), sources])
    return hashlib.sha256(content.encode()).hexdigest()[:8]


def diffs_of(causes: Iterable[Cause], versions: Mapping[str, Version], tested: Mapping[str, Version]) -> dict[str, str]:
    """Return unified diffs of the functions that causes involve, by `module:qualname`, without unchanged ones."""
    diffs: dict[str, str] = {}
    for function in dict.fromkeys(name for cause in causes for name in cause.functions):
        module, _, qualname = function.partition(":")
        package = module.partition(".")[0].replace("_", "-")
        before, after = tested.get(package), versions.get(package)
        if before is None or after is None or before == after:
            continue
        old, new = (sources_of(package, found, wheels_folder()) for found in (before, after))
        if text := function_diff(old, new, module, qualname):
            diffs[function] = text
    return diffs


def commit_of(checkout: Path) -> str:
    """Return the commit of a checkout. Empty if git cannot determine it."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)
    return done.stdout.strip()
