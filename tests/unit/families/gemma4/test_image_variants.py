"""State dicts, logits and gradients of variants of Gemma 4 with its towers."""

from nrl_models.families.gemma4.variants import MULTIMODAL_VARIANTS
from nrl_models.testing.suite.test_model import test_gradient_equivalence, test_logits_equivalence  # noqa: F401
from nrl_models.testing.suite.test_state_dict import *  # noqa: F403

FAMILY_VARIANTS = {
    name: ("nrl_models.families.gemma4.model:Gemma4ForConditionalGeneration", values)
    for name, values in MULTIMODAL_VARIANTS.items()
}
