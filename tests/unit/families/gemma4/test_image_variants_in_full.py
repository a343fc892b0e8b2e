"""All other generated tests on variants of Gemma 4 with its towers."""

import pytest
from families.gemma4.test_image_variants import FAMILY_VARIANTS  # noqa: F401

from nrl_models.testing.suite.test_files import *  # noqa: F403
from nrl_models.testing.suite.test_layers import *  # noqa: F403
from nrl_models.testing.suite.test_model import *  # noqa: F403
from nrl_models.testing.suite.test_sequences import *  # noqa: F403

pytestmark = pytest.mark.long
