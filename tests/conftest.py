"""Setup of every test run."""

import gc
import os
from collections.abc import Generator

import pytest
import transformers
from chosen_families import chosen, others, share_of
from packaging.version import Version

from nrl_models.common.checkpoint.publication import durable
from nrl_models.errors import UnmetRequirementError
from nrl_models.testing.plugin import CHOSEN, class_under_test, share_cores

pytest_plugins = ["pytester", "real_models"]

SHARED = pytest.StashKey[list[str]]()
"""Architectures that `--share` adds."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-families", action="store_true", help="run the generated tests for every architecture")
    parser.addoption(
        "--share",
        type=int,
        help="run also one N-th of the long tests, and of the other architectures (tests not marked thorough)",
    )
    parser.addoption("--cases", type=int, default=200, help="how many damaged inputs of each kind tests/campaign tries")
    parser.addoption("--fuzz-seed", type=int, default=0, help="which")


def pytest_configure(config: pytest.Config) -> None:
    share_cores()
    os.environ.setdefault(durable.VARIABLE, "0")  # tests need no protection from power failures
    os.environ.setdefault("HF_DEACTIVATE_ASYNC_LOAD", "1")  # transformers loads tiny models faster without threads
    if config.getoption("--all-families"):
        return
    parts = config.getoption("--share")
    config.stash[SHARED] = share_of(others(), parts) if parts else []
    config.stash[CHOSEN] = chosen() + config.stash[SHARED]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip thorough and long tests of a share's architectures, and other long tests outside the share.

    All families, or paths on the command line without `--share`, include all long tests.
    """
    if config.getoption("--all-families"):
        return
    shared = set(config.stash[SHARED])
    items[:] = [item for item in items if class_under_test(item) not in shared or not _is(item, "thorough", "long")]
    parts = config.getoption("--share")
    if parts or config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        long = {_group(item) for item in items if _is(item, "long")}
        selected = set(share_of(long, parts)) if parts else set()
        items[:] = [item for item in items if not _is(item, "long") or _group(item) in selected]


def _group(item: pytest.Item) -> str:
    """Return the name that tests with expensive fixtures share, so that a share runs all of them or none."""
    marker = item.get_closest_marker("xdist_group")
    return str(marker.args[0]) if marker else item.nodeid


def _is(item: pytest.Item, *markers: str) -> bool:
    return any(item.get_closest_marker(marker) is not None for marker in markers)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None, None, None]:
    """See `pytest_runtest_call`."""
    yield from _of_families_that_there_are()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, None, None]:
    """With an older transformers than tests are written for, skip tests of families that it does not have."""
    yield from _of_families_that_there_are()


def _of_families_that_there_are() -> Generator[None, None, None]:
    try:
        yield
    except UnmetRequirementError as error:
        from versions import tested_version

        if Version(transformers.__version__) >= tested_version():
            raise
        pytest.skip(str(error))


def pytest_collection_finish() -> None:
    """Exclude permanent objects (torch, transformers, tests) from garbage collection, which saves 20% of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
