"""The pytest plugin: `--nrl-family` selects classes, `--nrl-results` records outcomes.

pytest loads it in every environment with this package, so it has no heavy imports until a test requests a family.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Mapping
from functools import cache, lru_cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from nrl_models.testing.features import SUITE, Condition, conditions_of
from nrl_models.testing.results import ResultsRecorder
from nrl_models.testing.upstream_failures import (
    described,
    failure,
    failure_of_reference,
    is_of_reading_back,
    places,
)

if TYPE_CHECKING:
    from nrl_models.testing.case import FamilyCase


CHOSEN = pytest.StashKey[list[str]]()
"""Key in a configuration's stash: architectures to test if `--nrl-family` names none. Default: all."""


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
    group.addoption(
        "--nrl-compare", action="store_true", help="run failed tests on transformers' class too, for --nrl-results"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Collect the suite if only `--nrl-family` is passed, and record results if requested."""
    config.addinivalue_line("markers", "thorough: not run for architectures that `--share` adds")
    config.addinivalue_line("markers", "xdist_group(name): tests for one worker, where pytest-xdist is installed")
    if config.getoption("--nrl-family"):
        sys.path.insert(0, str(config.invocation_params.dir))  # a family may be in pytest's start directory
        chosen = config.args_source is pytest.Config.ArgsSource.ARGS
        config.args = [*(config.args if chosen else []), str(SUITE)]
    if (file := config.getoption("--nrl-results")) and not hasattr(config, "workerinput"):
        config.pluginmanager.register(ResultsRecorder(Path(file)), "nrl_models-results")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Create one test per class that it applies to, or per entry in the module's `FAMILY_VARIANTS`.

    `FAMILY_VARIANTS` maps a name to a class, in the format of `--nrl-family`, and values for its tiny configuration. A
    module that imports the suite's tests can run them on other configurations this way.
    """
    if "family_case" not in metafunc.fixturenames:
        return
    if variants := getattr(metafunc.module, "FAMILY_VARIANTS", None):
        names = [f"{target}#{name}" for name, (target, _) in variants.items()]
        _variants.update(zip(names, (values for _, values in variants.values()), strict=True))
    elif names := metafunc.config.getoption("--nrl-family"):
        if problems := [problem for name in names if (problem := _problem_with(name))]:
            pytest.fail("\n".join(problems), pytrace=False)
    else:
        from nrl_models import registry

        names = metafunc.config.stash.get(CHOSEN, []) or registry.architectures(aliases=False)
    chosen = [name for name in names if all(_meets(condition, name) for condition in conditions_of(metafunc.function))]
    metafunc.parametrize("family_case", [_param(name) for name in chosen or [NONE]], indirect=True)


NONE = "#none"
"""Placeholder for tests that apply to no class. pytest would create a skipped test for an empty list."""


@cache
def _meets(condition: Condition, name: str) -> bool:
    """Return True if a class satisfies a condition, or if that is unknown. Its tests are then collected and fail."""
    from nrl_models import registry

    if registry.unmet_requirement(_architecture(name)):
        return True
    try:
        return condition(_new_case(name))
    except Exception:  # any error of importing the family
        return True


_variants: dict[str, Mapping[str, Any]] = {}  # values for tiny configurations, by class and variant


def _param(name: str) -> Any:
    architecture = name.rpartition(":")[2].replace("#", "-")
    # The tests of one class share its models, so they belong on one worker.
    return pytest.param(name, id=architecture, marks=pytest.mark.xdist_group(architecture))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order tests by class, so that the models of a class are built once, and freed afterwards."""
    items[:] = [item for item in items if class_under_test(item) != NONE]
    order: dict[str | None, int] = {None: 0}
    for item in items:
        order.setdefault(class_under_test(item), len(order))
    items.sort(key=lambda item: order[class_under_test(item)])


def _architecture(name: str) -> str:
    return name.partition("#")[0].rpartition(":")[2]


def class_under_test(item: pytest.Item) -> str | None:
    """Return the class under test in the format of `--nrl-family`; None for other tests."""
    callspec = getattr(item, "callspec", None)
    return callspec.params.get("family_case") if callspec else None


def _problem_with(name: str) -> str | None:
    """Return the problem if a name is not a family's class. Tests show errors of the family's code."""
    from nrl_models import registry
    from nrl_models.errors import did_you_mean
    from nrl_models.family import FamilyModel

    module, colon, attribute = name.partition(":")
    if not colon:
        if name in registry.architectures():
            return None
        hint = did_you_mean(name, registry.architectures())
        return (
            f"--nrl-family {name}: no family serves that architecture{hint}. Register it, or give its class as "
            "MODULE:CLASS"
        )
    try:
        target = getattr(import_module(module), attribute, None)
    except ModuleNotFoundError as error:
        if error.name and f"{module}.".startswith(f"{error.name}."):
            return f"--nrl-family {name}: there is no module {error.name} on the Python path"
        return None
    except ImportError:
        return None
    if target is None:
        return f"--nrl-family {name}: {module} has no {attribute}"
    if not (isinstance(target, type) and issubclass(target, FamilyModel)):
        return f"--nrl-family {name}: expected a class that extends FamilyModel (docs/add-a-family.md), not {target!r}"
    return None


@pytest.fixture
def family_case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FamilyCase:
    """Return the class under test, with its models.

    For a test of a feature in the family's `limits`, the limit is removed: the test has to fail because transformers'
    class fails (`pytest_pyfunc_call`), not because of our check. Models inside the model also have the limit.
    """
    from nrl_models.common.documents.packing import KeepsDocumentsApart

    request.node.user_properties.append(("architecture", _architecture(request.param)))
    case = _case(request.param)
    limits, feature = case.model_class.limits, getattr(request.function, "feature", "")
    if reason := limits.get(feature):
        request.node.limit = _Limit(request.param, feature, reason)
        inner = {type(module) for module in case.model().modules() if isinstance(module, KeepsDocumentsApart)}
        stated: list[Any] = [case.model_class, *inner]
        for limited in stated:
            lifted = {name: why for name, why in limited.limits.items() if name != feature}
            monkeypatch.setattr(limited, "limits", lifted)
    return case


class _Limit(NamedTuple):
    """A feature that a class does not support according to its `limits`, with the reason."""

    family: str
    feature: str
    reason: str


_shown: set[_Limit] = set()  # limits for which a test has failed on both classes
_left: dict[_Limit, set[str]] = {}  # the tests of each limit that have not run yet


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """If a test of a limited feature fails, run it on transformers' class, which has to fail in the same way.

    Then the outcome is an expected failure. A limit is out of date if all of the feature's tests pass.
    """
    limit: _Limit | None = getattr(pyfuncitem, "limit", None)
    is_compared = pyfuncitem.config.getoption("--nrl-compare") and "family_case" in pyfuncitem.funcargs
    if limit is None and not is_compared:
        return None
    arguments: dict[str, Any] = {
        name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters
    }
    if limit is None:
        return _compare(pyfuncitem, arguments)
    left = _left.setdefault(limit, _tests_of(pyfuncitem.session, limit))
    left.discard(pyfuncitem.nodeid)
    ours = failure(pyfuncitem.obj, arguments)
    if ours is not None:
        upstream = failure_of_reference(pyfuncitem.obj, arguments)
        if described(ours) != described(upstream):
            raise AssertionError(
                f"{described(ours)}; transformers' class: {described(upstream)}. The limit stated is {limit.reason!r}"
            ) from ours
        _shown.add(limit)
        pytest.xfail(limit.reason)
    if not left and limit not in _shown:
        pytest.fail(f"every test of {limit.feature!r} passes: remove that from the family's limits")
    return True


def _compare(item: pytest.Function, arguments: Mapping[str, Any]) -> bool:
    """Run a test. If it fails, note in the item whether transformers' class is the cause.

    Tests of features that transformers' class may lack run again on that class. It is the cause if it fails in the same
    way at the same place. Other tests build our class or check its declarations. Their failures are due to
    transformers' class if it changes the differing tensors when it loads its files.
    """
    from nrl_models.testing.features import INVARIANCES

    ours = failure(item.obj, arguments)
    if ours is None:
        return True
    if getattr(item.obj, "feature", "") not in INVARIANCES:
        if is_of_reading_back(ours, arguments["family_case"]):
            item.user_properties.append(("upstream", True))
        raise ours
    upstream = failure_of_reference(item.obj, arguments)
    if described(ours) == described(upstream) and places(ours) == places(upstream):
        item.user_properties.append(("upstream", True))
    raise ours


def _tests_of(session: pytest.Session, limit: _Limit) -> set[str]:
    """Return the tests of a limited feature that are to run.

    If some tests of the feature were not chosen, the result also has their names. They never run, so the limit is not
    reported as out of date.
    """
    from nrl_models.testing.features import applies, suite

    chosen = {
        item.nodeid: item.function.__name__
        for item in session.items
        if isinstance(item, pytest.Function)
        and class_under_test(item) == limit.family
        and getattr(item.function, "feature", "") == limit.feature
    }
    proving = {test for test in suite().values() if test.feature == limit.feature}  # type: ignore[attr-defined]
    case = _case(limit.family)
    return chosen.keys() | ({test.__name__ for test in proving if applies(test, case)} - set(chosen.values()))


def share_cores() -> None:
    """Leave each of several xdist workers its share of the cores: threads that wait for each other cost minutes."""
    import torch

    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))


@lru_cache(maxsize=1)
def _case(name: str) -> FamilyCase:
    from nrl_models import registry

    share_cores()
    if unmet := registry.unmet_requirement(_architecture(name)):
        pytest.skip(f"{name} needs {unmet}")
    return _new_case(name)


def _new_case(name: str) -> FamilyCase:
    from nrl_models import registry
    from nrl_models.testing.case import FamilyCase

    module, colon, attribute = name.partition("#")[0].partition(":")
    model_class: Any = getattr(import_module(module), attribute) if colon else registry.model_class(module)
    return FamilyCase(model_class, tiny=_variants.get(name, {}))
