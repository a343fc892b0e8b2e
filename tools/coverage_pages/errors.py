"""The error of the coverage pages."""

from nrl_models.errors import NRLModelsError


class CoverageError(NRLModelsError):
    """What was recorded is not here, does not cover what is asked for, or could not be made."""
