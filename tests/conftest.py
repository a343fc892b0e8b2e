"""Set-up of every test run."""

import gc

from nrl_models.testing.plugin import share_cores

pytest_plugins = ["pytester"]


def pytest_configure() -> None:
    share_cores()


def pytest_collection_finish() -> None:
    """Spare the collector what stays anyhow: torch, transformers and ten thousand tests, a fifth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
