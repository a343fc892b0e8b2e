"""The generated tests on variants of Gemma 4 other than the default configuration."""

from nrl_models.families.gemma4.variants import VARIANTS
from nrl_models.testing.suite.test_files import *  # noqa: F403
from nrl_models.testing.suite.test_layers import *  # noqa: F403
from nrl_models.testing.suite.test_model import *  # noqa: F403
from nrl_models.testing.suite.test_sequences import *  # noqa: F403
from nrl_models.testing.suite.test_state_dict import *  # noqa: F403

TEXT = "nrl_models.families.gemma4.model:Gemma4ForCausalLM"

FAMILY_VARIANTS = {name: (TEXT, values) for name, values in VARIANTS.items()}
