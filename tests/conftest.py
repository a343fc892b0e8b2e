"""Set-up of every test run."""

import gc

import pytest

from nrl_models.testing.plugin import CHOSEN, share_cores

pytest_plugins = ["pytester", "real_models"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-families", action="store_true", help="run the generated tests for every architecture")
    parser.addoption(
        "--other-families", action="store_true", help="run what a run with --all-families has beside one without"
    )


def pytest_configure(config: pytest.Config) -> None:
    share_cores()
    if config.getoption("--all-families"):
        return
    from chosen_families import chosen, others

    config.stash[CHOSEN] = others() if config.getoption("--other-families") else chosen()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of the tests collected for other families, leave those that are of no family."""
    if config.getoption("--other-families"):
        rest = set(config.stash[CHOSEN])
        items[:] = [
            item
            for item in items
            if getattr(item, "callspec", None) and item.callspec.params.get("family_case") in rest
        ]


def pytest_collection_finish() -> None:
    """Spare the collector what stays anyhow: torch, transformers and ten thousand tests, a fifth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
