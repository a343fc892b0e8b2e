"""Setup of every test run."""

import gc
import os
from collections.abc import Generator

import pytest
import transformers
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
        "--share", type=int, help="also run tests not marked thorough for one in this many of the other architectures"
    )
    parser.addoption("--cases", type=int, default=200, help="how many damaged inputs of each kind tests/campaign tries")
    parser.addoption("--fuzz-seed", type=int, default=0, help="which")


def pytest_configure(config: pytest.Config) -> None:
    share_cores()
    os.environ.setdefault(durable.VARIABLE, "0")  # tests need no protection from power failures
    os.environ.setdefault("HF_DEACTIVATE_ASYNC_LOAD", "1")  # transformers loads tiny models faster without threads
    if config.getoption("--all-families"):
        return
    from chosen_families import chosen, others, share_of

    parts = config.getoption("--share")
    config.stash[SHARED] = share_of(others(), parts) if parts else []
    config.stash[CHOSEN] = chosen() + config.stash[SHARED]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip long tests unless all families run or their file is named, and thorough ones of a share's families."""
    if config.getoption("--all-families"):
        return
    shared = set(config.stash[SHARED])
    items[:] = [item for item in items if class_under_test(item) not in shared or _is_quick(item)]
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        items[:] = [item for item in items if not item.get_closest_marker("long")]


def _is_quick(item: pytest.Item) -> bool:
    return not any(item.get_closest_marker(name) for name in ("thorough", "long"))


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
