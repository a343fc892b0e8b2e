"""Set-up of every test run."""

from nrl_models.testing.plugin import share_cores

pytest_plugins = ["pytester"]


def pytest_configure() -> None:
    share_cores()
