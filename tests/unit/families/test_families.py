"""The generated tests, for every registered architecture."""

from nrl_models.testing.suite import *  # noqa: F403
