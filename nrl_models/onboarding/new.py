"""Create a new family from a configuration: write it, test it, and move it into place when it is complete."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from keyword import iskeyword
from pathlib import Path
from typing import Any

import nrl_models
from nrl_models.onboarding.family_plan import FamilyPlan, OnboardingError, plan_family
from nrl_models.onboarding.family_source import facts_source, write_package, write_project
from nrl_models.testing.features import INVARIANCES, SUITE, generated_tests

Result = dict[str, Any]


@dataclass(frozen=True)
class Onboarding:
    """Result of onboarding a family.

    Args:
        plan: The plan of the family.
        limits: Features that transformers' class lacks, with the reason.
        results: Result of each generated test, in the format of `pytest --nrl-results`.
        files: Written files.
        undecided: Open decisions and failures; empty if the family is complete.
        upstream: Failures of generated tests that transformers' own class fails in the same way.
    """

    plan: FamilyPlan
    limits: Mapping[str, str]
    results: tuple[Result, ...]
    files: tuple[Path, ...]
    undecided: tuple[str, ...]
    upstream: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing is left to decide, and all generated tests pass."""
        return not self.undecided and not self.upstream


def new_family(
    source: str | Path, *, name: str | None = None, out_of_tree: Path | None = None, again: bool = False
) -> Onboarding:
    """Create a family for the model with the configuration in `source`.

    The package is written and tested in a temporary directory, and then moved into place, even if tests fail, so that
    a person can continue. If the command is interrupted, nothing is written.

    Args:
        source: A directory with `config.json`, with or without weights, or such a file.
        name: Name of the package. None uses the configuration's `model_type`.
        out_of_tree: New directory for an installable package with entry points. None writes into this repository: the
            package, its ledger and its coverage page.
        again: See `plan_family`.

    Raises:
        OnboardingError: If no family can be created from the configuration, or a file is in the way. Nothing was
            written.
    """
    root = Path(nrl_models.__path__[0]).parent
    plan = plan_family(source, name, again=again)
    package = f"nrl_models_{plan.name}" if out_of_tree is not None else plan.name
    _check_room(plan, out_of_tree, root)
    if not plan.detection.groups and plan.detection.ok:
        raise OnboardingError(
            f"{plan.architectures[0]} has no linears that read one input and can be combined, so it needs no family: "
            "it loads, saves and exports as transformers' own class. Nothing was written."
        )
    beside = (out_of_tree or root / "nrl_models" / "families" / plan.name).resolve().parent
    beside.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".nrl-new-", dir=beside) as stage:
        limits, results = prove(plan, package, Path(stage) / "package")
        if out_of_tree is not None:
            write_project(plan, package, Path(stage) / "package")
            files = _place(Path(stage) / "package", out_of_tree)
        else:
            files = _place(Path(stage) / "package" / package, beside / plan.name)
    undecided = [*plan.undecided, *_failures(results, of_upstream=False)]
    if out_of_tree is None:
        written, problems = _register(plan, root, results)
        files, undecided = [*files, *written], [*undecided, *problems]
    upstream = tuple(_failures(results, of_upstream=True))
    return Onboarding(plan, limits, tuple(results), tuple(files), tuple(undecided), upstream)


def prove(plan: FamilyPlan, package: str, folder: Path) -> tuple[dict[str, str], list[Result]]:
    """Write the package to `folder / package`, run the generated tests on it, and find its limits.

    Returns:
        The limits, which the package then states, and the test results with these limits.
    """
    write_package(plan, {}, folder / package)
    if not plan.detection.ok:  # all tests would fail for the same reason
        return {}, []
    results = run_tests(f"{package}.model", plan.architectures, folder)
    suspects = sorted(_features(results, "failed") & set(INVARIANCES))
    limits = {feature: _reason(plan, results, feature) for feature in suspects}
    while limits:  # tests of limited features also run on transformers' class, which has to fail in the same way
        write_package(plan, limits, folder / package)
        # Only tests of limited features and of logits, which use replay, can change.
        concerned = {name for name, feature in generated_tests().items() if feature in (*limits, "logits")}
        rerun = run_tests(f"{package}.model", plan.architectures, folder, sorted(concerned))
        lacking = _features(rerun, "limited")
        if lacking.issuperset(limits):
            unchanged_results = [result for result in results if _test(result) not in concerned]
            results = sorted([*unchanged_results, *rerun], key=lambda result: (result["architecture"], result["check"]))
            break
        limits = {feature: reason for feature, reason in limits.items() if feature in lacking}
    write_package(plan, limits, folder / package)
    return limits, results


def run_tests(module: str, architectures: Iterable[str], folder: Path, tests: Iterable[str] = ()) -> list[Result]:
    """Run generated tests on a module's classes in a subprocess.

    Args:
        module: Module name, importable with `folder` on the path.
        architectures: Names of its classes.
        folder: Directory to add to the path.
        tests: Names of the tests; all if empty.

    Raises:
        OnboardingError: If pytest could not run them.
    """
    if find_spec("pytest") is None:
        raise OnboardingError(
            "pytest is not installed, and the generated tests need it: pip install '.[test]' in a checkout"
        )
    with tempfile.TemporaryDirectory() as out:
        file = Path(out) / "results.json"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            f"--nrl-results={file}",
            "--nrl-compare",
        ]
        command += ["--rootdir", out, *(f"--nrl-family={module}:{name}" for name in architectures)]
        if tests:
            command += ["-k", " or ".join(tests)]
        path = os.pathsep.join(filter(None, [str(folder), str(SUITE.parents[2]), os.environ.get("PYTHONPATH", "")]))
        environment = os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=out)
        if done.returncode not in (0, 1) or not file.is_file():
            output = (done.stdout + done.stderr)[-3000:]
            raise OnboardingError(f"pytest ended with exit status {done.returncode}:", *output.splitlines())
        return json.loads(file.read_text())["results"]


def _failures(results: Iterable[Result], *, of_upstream: bool) -> list[str]:
    """Describe failed tests: those that transformers' class fails in the same way, or the others."""
    return [
        f"{result['architecture']}: {result['check']} failed: {result['reason']}"
        for result in results
        if result["outcome"] == "failed" and bool(result.get("upstream")) == of_upstream
    ]


def _test(result: Result) -> str:
    return result["check"].partition("[")[0]


def _features(results: Iterable[Result], outcome: str) -> set[str]:
    proofs = generated_tests()
    return {proofs[name] for result in results if result["outcome"] == outcome and (name := _test(result)) in proofs}


def _reason(plan: FamilyPlan, results: Iterable[Result], feature: str) -> str:
    proofs = generated_tests()
    failed = {_test(result) for result in results if result["outcome"] == "failed"}
    names = sorted(name for name in failed if proofs[name] == feature)
    return f"transformers' own {plan.model_class.__name__.partition('For')[0]} also fails {', '.join(names)}"


def _check_room(plan: FamilyPlan, out_of_tree: Path | None, root: Path) -> None:
    """Check that nothing would be overwritten and the target is valid, before any work is done."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", plan.name) or iskeyword(plan.name):
        raise OnboardingError(f"{plan.name!r} is not a package name; choose a lowercase name with --name")
    target = out_of_tree or root / "nrl_models" / "families" / plan.name
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise OnboardingError(f"{target} exists; nothing was written. Remove it, or choose another name or directory.")
    if out_of_tree is None and not (root / "docs" / "model-coverage").is_dir():
        raise OnboardingError(f"{root} is not a checkout of nrl_models: use --out-of-tree DIR")


def _place(made: Path, target: Path) -> list[Path]:
    if target.is_dir():
        target.rmdir()  # it is empty
    made.rename(target)
    target.chmod(0o755)
    return sorted(path for path in target.rglob("*") if path.is_file())


def _register(plan: FamilyPlan, root: Path, results: list[Result]) -> tuple[list[Path], list[str]]:
    """Register the family, and add its results to the coverage pages. Returns written files, and failures."""
    facts = root / "nrl_models" / "families" / plan.name / "__init__.py"
    facts.write_text(facts_source(plan))
    if not results:
        return [], []
    pages = root / "docs" / "model-coverage"
    # This process's registry lacks the family, so a subprocess writes its ledger, results and page.
    written: list[Path] = []
    problems: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "results.json"
        versions = {package: version(package) for package in ("nrl_models", "torch", "transformers")}
        file.write_text(json.dumps({"versions": versions, "results": results}))
        for subject, arguments, made in (
            (
                "the ledger of its configuration's keys",
                ["tools.ledger", "--again", *plan.architectures],
                [root / "tools" / "ledger" / "recorded" / f"{plan.name}.json"],
            ),
            (
                "the coverage pages",
                ["tools.coverage_pages", "--results", str(file)],
                [pages / "results" / f"{plan.name}.json", pages / f"{plan.name}.md"],
            ),
        ):
            command = [sys.executable, "-m", *arguments]
            done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=root)
            if done.returncode != 0:
                output = (done.stderr.strip() or done.stdout.strip())[-1000:]
                problems.append(f"{subject} could not be written: {output}")
            else:
                written += made
    return written, problems
