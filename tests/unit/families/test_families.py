"""The generated tests, for every registered architecture."""

from nrl_models.testing.suite.test_files import *  # noqa: F403
from nrl_models.testing.suite.test_groups import *  # noqa: F403
from nrl_models.testing.suite.test_layers import *  # noqa: F403
from nrl_models.testing.suite.test_model import *  # noqa: F403
from nrl_models.testing.suite.test_sequences import *  # noqa: F403
from nrl_models.testing.suite.test_state_dict import *  # noqa: F403
