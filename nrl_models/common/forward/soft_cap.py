"""Attention with soft-capped scores, which transformers' `sdpa` leaves uncapped in older versions, without a word.

Its classes pass `softcap` to whichever kernel is chosen, and `sdpa`, the default, did not look at it. transformers says
now that such classes have no `sdpa`; so does a family's class on an older one, and is then computed by `eager`.
"""

from __future__ import annotations

import inspect
import sys
from functools import cache

from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


@cache
def sdpa_knows_soft_caps() -> bool:
    """Whether the installed transformers refuses a soft cap that its `sdpa` would not apply."""
    return "softcap" in inspect.getsource(ALL_ATTENTION_FUNCTIONS["sdpa"])


def drops_soft_cap(upstream: type[PreTrainedModel]) -> bool:
    """Whether a class of transformers would lose the soft cap of its attention scores under `sdpa`."""
    if sdpa_knows_soft_caps() or not upstream._supports_sdpa:
        return False
    return "softcap=self." in inspect.getsource(sys.modules[upstream.__module__])


def reference_attention(upstream: type[PreTrainedModel]) -> dict[str, str]:
    """What to build a class of transformers with that is compared with: attention that drops no soft cap."""
    return {"attn_implementation": "eager"} if drops_soft_cap(upstream) else {}
