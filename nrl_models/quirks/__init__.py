"""Known quirks of models, packages and engines, as data: which models have them, what handles them, until when."""

from nrl_models.quirks.catalogue import CATALOGUE
from nrl_models.quirks.evidence import Evidence, Pattern, VerdictKind
from nrl_models.quirks.quirk import Quirk
from nrl_models.quirks.subject import Subject

__all__ = ["CATALOGUE", "Evidence", "Pattern", "Quirk", "Subject", "VerdictKind"]
