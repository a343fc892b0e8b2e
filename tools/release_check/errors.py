"""Errors that end a release check, or its part for one package, with a one-line message."""

from __future__ import annotations

from nrl_models.errors import NRLModelsError


class ReleaseCheckError(NRLModelsError):
    """A release cannot be judged: the arguments, the index or the installation is wrong."""


class NoIndexError(ReleaseCheckError):
    """The package index does not respond."""


class NoReleaseError(ReleaseCheckError):
    """The index has no such package, or no such version of it."""


class SkippedPhaseError(ReleaseCheckError):
    """A phase has nothing to check with the versions under test."""


class PhaseError(ReleaseCheckError):
    """A phase did not finish. Its outcomes so far are in the output folder."""


class InstallError(ReleaseCheckError):
    """pip could not install a package."""
