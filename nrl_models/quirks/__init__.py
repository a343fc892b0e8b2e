"""Known quirks of models, packages and engines, as data: whom they concern, who handles them, and until when."""

from nrl_models.quirks.catalogue import CATALOGUE
from nrl_models.quirks.quirk import Quirk
from nrl_models.quirks.subject import Subject

__all__ = ["CATALOGUE", "Quirk", "Subject"]
