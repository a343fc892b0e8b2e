"""The catalog: every known quirk, how it is handled, how to switch that off, and how to tell that it is fixed.

An entry points at the code that handles it. `docs/quirks.md` is made from this; `tests/unit/quirks` and
`tests/engine/test_quirks.py` have for each the symptom, the cure and the tripwire.
"""

from nrl_models.quirks.engine_quirks import EXPORT, INFERENCE
from nrl_models.quirks.forward_quirks import FORWARD
from nrl_models.quirks.loading_quirks import LOADING
from nrl_models.quirks.quirk import Quirk
from nrl_models.quirks.training_quirks import TRAINING

CATALOG: tuple[Quirk, ...] = (*LOADING, *FORWARD, *TRAINING, *EXPORT, *INFERENCE)
"""Every known quirk, in the order of a run: load, forward, train, export, infer."""
