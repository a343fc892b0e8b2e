"""The pytest plugin: `--nrl-family` chooses classes, `--nrl-results` records what came out.

It is loaded wherever this package is installed, so it imports nothing heavy until a test asks for a family.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from nrl_models.testing.features import SUITE

if TYPE_CHECKING:
    from nrl_models.testing.case import FamilyCase


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("nrl_models", "equivalence tests of model families")
    group.addoption(
        "--nrl-family",
        action="append",
        default=[],
        metavar="MODULE:CLASS",
        help="run the generated tests for this class (repeatable), registered or not",
    )
    group.addoption("--nrl-results", metavar="FILE", help="write the outcome of every generated test to this JSON file")


def pytest_configure(config: pytest.Config) -> None:
    """Make `--nrl-family` alone collect the suite, and record results if asked."""
    config.addinivalue_line("markers", "xdist_group(name): tests for one worker, where pytest-xdist is installed")
    if config.getoption("--nrl-family"):
        chosen = config.args_source is pytest.Config.ArgsSource.ARGS
        config.args = [*(config.args if chosen else []), str(SUITE)]
    if (file := config.getoption("--nrl-results")) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(ResultsRecorder(Path(file)), "nrl_models-results")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each class."""
    if "family_case" not in metafunc.fixturenames:
        return
    names = metafunc.config.getoption("--nrl-family")
    if problems := [problem for name in names if (problem := _problem_with(name))]:
        pytest.fail("\n".join(problems), pytrace=False)
    if not names:
        from nrl_models import registry

        names = registry.architectures()
    metafunc.parametrize("family_case", [_param(name) for name in names], indirect=True)


def _param(name: str) -> Any:
    architecture = name.rpartition(":")[2]
    # The tests of one class share its models, so they belong on one worker.
    return pytest.param(name, id=architecture, marks=pytest.mark.xdist_group(architecture))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests of one class together: its models are built once, and not kept for longer."""
    generated = [item for item in items if "family_case" in getattr(item, "fixturenames", ())]
    order = {name: index for index, name in enumerate(dict.fromkeys(map(_class_name, generated)))}
    generated.sort(key=lambda item: order[_class_name(item)])
    others = [item for item in items if "family_case" not in getattr(item, "fixturenames", ())]
    items[:] = [*others, *generated]


def _class_name(item: pytest.Item) -> str:
    return item.callspec.params["family_case"]  # type: ignore[attr-defined]


def _problem_with(name: str) -> str | None:
    """Why a name given to `--nrl-family` is none of a family's class. Code that fails is left to the tests to show."""
    from nrl_models import registry
    from nrl_models.common import FamilyModel

    module, colon, attribute = name.partition(":")
    if not colon:
        if name in registry.architectures():
            return None
        return (
            f"--nrl-family {name}: no family serves that architecture. Register it, or give its class as MODULE:CLASS"
        )
    try:
        found = getattr(import_module(module), attribute, None)
    except ModuleNotFoundError as error:
        if error.name and f"{module}.".startswith(f"{error.name}."):
            return f"--nrl-family {name}: there is no module {error.name} on the Python path"
        return None
    except ImportError:
        return None
    if found is None:
        return f"--nrl-family {name}: {module} has no {attribute}"
    if not (isinstance(found, type) and issubclass(found, FamilyModel)):
        return f"--nrl-family {name}: expected a class that extends FamilyModel (CONTRIBUTING.md), not {found!r}"
    return None


def _class_of(name: str) -> Any:
    from nrl_models import registry

    module, colon, attribute = name.partition(":")
    return getattr(import_module(module), attribute) if colon else registry.model_class(name)


@pytest.fixture
def family_case(request: pytest.FixtureRequest) -> FamilyCase:
    """The class under test, with its models."""
    request.node.user_properties.append(("architecture", request.param.rpartition(":")[2]))
    case = _case(request.param)
    if reason := case.model_class.limits.get(getattr(request.function, "feature", "")):
        request.node.add_marker(pytest.mark.xfail(reason=reason, strict=True))
    return case


def share_cores() -> None:
    """Leave each of several xdist workers its share of the cores: threads that wait for each other cost minutes."""
    import torch

    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))


@lru_cache(maxsize=1)
def _case(name: str) -> FamilyCase:
    from nrl_models import registry
    from nrl_models.testing.case import FamilyCase

    share_cores()
    if unmet := registry.unmet_requirement(name):
        pytest.skip(f"{name} needs {unmet}")
    return FamilyCase(_class_of(name))


class ResultsRecorder:
    """Collects the outcome of every test that has an architecture.

    The file holds `{"versions": {...}, "results": [{"architecture", "check", "outcome", "reason"}]}`, where a check is
    a test's name, its dtype included, and an outcome is `passed`, `failed`, `skipped` (does not apply) or `limited`
    (fails, as the family says).
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.results: dict[str, dict[str, Any]] = {}

    @pytest.hookimpl
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a phase's outcome; a failure in any phase wins."""
        architecture = dict(report.user_properties).get("architecture")
        if architecture is None or (report.when != "call" and report.outcome == "passed"):
            return
        name = report.nodeid.partition("::")[2].partition("@")[0]
        check = name.replace(f"[{architecture}]", "").replace(f"{architecture}-", "")
        limit = getattr(report, "wasxfail", "").removeprefix("reason: ")
        skipped = report.outcome == "skipped" and isinstance(report.longrepr, tuple)
        self.results[name] = {
            "architecture": architecture,
            "check": check,
            "outcome": "limited" if limit else report.outcome,
            "reason": limit or (report.longrepr[2] if skipped else ""),
        }

    @pytest.hookimpl
    def pytest_sessionfinish(self) -> None:
        """Write the file."""
        content = {"versions": dict(_versions()), "results": [self.results[name] for name in sorted(self.results)]}
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.file.write_text(json.dumps(content, indent=1) + "\n")


def _versions() -> Iterator[tuple[str, str]]:
    from importlib.metadata import version

    for package in ("nrl_models", "torch", "transformers"):
        yield package, version(package)
