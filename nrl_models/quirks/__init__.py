"""Known quirks of models, packages and engines as data: affected models, handling, and the release with a fix."""

from nrl_models.deprecation import old_names
from nrl_models.quirks.catalog import CATALOG
from nrl_models.quirks.evidence import Evidence, Pattern, VerdictKind
from nrl_models.quirks.quirk import Quirk
from nrl_models.quirks.subject import Subject

__all__ = ["CATALOG", "Evidence", "Pattern", "Quirk", "Subject", "VerdictKind"]

__getattr__ = old_names(__name__, {"CATALOGUE": "CATALOG"})  # codespell:ignore
