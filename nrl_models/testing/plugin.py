"""The pytest plugin: `--nrl-family` chooses classes, `--nrl-results` records what came out.

It is loaded wherever this package is installed, so it imports nothing heavy until a test asks for a family.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from nrl_models.testing.case import FamilyCase

SUITE = Path(__file__).with_name("suite.py")
"""The generated tests."""


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
    """One test for each class or, where a test asks for them, for each layer that the class rewrites."""
    if "family_case" not in metafunc.fixturenames:
        return
    names = metafunc.config.getoption("--nrl-family")
    if problems := [problem for name in names if (problem := _problem_with(name))]:
        pytest.fail("\n".join(problems), pytrace=False)
    if not names:
        from nrl_models import registry

        names = registry.architectures()
    if "rewritten_layer" not in metafunc.fixturenames:
        metafunc.parametrize("family_case", [_param(name, name) for name in names], indirect=True)
        return
    kind = metafunc.function.__name__.removeprefix("test_").removesuffix("_equivalence")
    layers = [_param(name, name, layer) for name in names for layer in _rewritten_layers(name, kind)]
    metafunc.parametrize("family_case, rewritten_layer", layers, indirect=["family_case"])


def _param(name: str, *values: str) -> Any:
    architecture = name.rpartition(":")[2]
    # The tests of one class share its models, so they belong on one worker.
    return pytest.param(*values, id="-".join([architecture, *values[1:]]), marks=pytest.mark.xdist_group(architecture))


def _rewritten_layers(name: str, kind: str) -> list[str]:
    """Names of the classes that the class of `name` rewrites, of one kind: attention, mlp, or any other layer."""
    try:
        rewritten = [original.__name__ for original in _class_of(name).rewrites]
    except (ImportError, AttributeError):
        return ["unknown"]  # the test itself then says why
    kinds = {one: "attention" if "Attention" in one else "mlp" if "MLP" in one else "layer" for one in rewritten}
    return [one for one in rewritten if kinds[one] == kind]


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
    return _case(request.param)


def share_cores() -> None:
    """Leave each of several xdist workers its share of the cores: threads that wait for each other cost minutes."""
    import torch

    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))


_cases: dict[str, FamilyCase] = {}


def _case(name: str) -> FamilyCase:
    from nrl_models import registry
    from nrl_models.testing.case import FamilyCase

    share_cores()
    if name not in _cases:
        if unmet := registry.unmet_requirement(name):
            pytest.skip(f"{name} needs {unmet}")
        _cases[name] = FamilyCase(_class_of(name))
    return _cases[name]


class ResultsRecorder:
    """Collects the outcome of every test that has an architecture.

    The file holds `{"versions": {...}, "results": [{"architecture", "check", "outcome", "reason"}]}`,
    where a check is a test's name, its dtype included.
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
        self.results[name] = {
            "architecture": architecture,
            "check": check,
            "outcome": report.outcome,
            "reason": report.longrepr[2] if report.outcome == "skipped" and isinstance(report.longrepr, tuple) else "",
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
