"""Attention with soft-capped scores, which `sdpa` silently ignores in older versions of transformers.

In those, model classes pass `softcap` to any attention function, and `sdpa`, the default, ignored it. Newer versions
declare that these classes do not support `sdpa`. For older versions, the family's class declares it and runs `eager`.
"""

from __future__ import annotations

import inspect
import sys
from functools import cache

from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


@cache
def sdpa_knows_soft_caps() -> bool:
    """Return True if the installed transformers rejects a soft cap that its `sdpa` would not apply."""
    return "softcap" in inspect.getsource(ALL_ATTENTION_FUNCTIONS["sdpa"])


def drops_soft_cap(upstream: type[PreTrainedModel]) -> bool:
    """Return True if a class of transformers would lose the soft cap of its attention scores with `sdpa`."""
    if sdpa_knows_soft_caps() or not upstream._supports_sdpa:
        return False
    return "softcap=self." in inspect.getsource(sys.modules[upstream.__module__])


def reference_attention(upstream: type[PreTrainedModel]) -> dict[str, str]:
    """Return keywords for building a reference of class `upstream`, with attention that applies soft caps."""
    return {"attn_implementation": "eager"} if drops_soft_cap(upstream) else {}
