"""The exception of the coverage pages."""

from nrl_models.errors import NRLModelsError


class CoverageError(NRLModelsError):
    """Recorded outcomes are missing or damaged, or could not be produced."""
