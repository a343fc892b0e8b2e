"""Set-up of every test run."""

import gc

import pytest

from nrl_models.testing.plugin import CHOSEN, share_cores

pytest_plugins = ["pytester"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-families", action="store_true", help="run the generated tests for every architecture")


def pytest_configure(config: pytest.Config) -> None:
    share_cores()
    if not config.getoption("--all-families"):
        from chosen_families import chosen

        config.stash[CHOSEN] = chosen()


def pytest_collection_finish() -> None:
    """Spare the collector what stays anyhow: torch, transformers and ten thousand tests, a fifth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
