"""The classes that modules with a bug have: made here, so that pickle finds them."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping
from typing import Any

from torch import nn

_numbers = itertools.count()


def subclass(layer: type[nn.Module], attributes: Mapping[str, Any]) -> type[nn.Module]:
    """A subclass of `layer`, of its name, with other `attributes`."""
    made = type(layer.__name__, (layer,), {"__module__": __name__, "__doc__": layer.__doc__, **attributes})
    made.__qualname__ = f"{layer.__name__}_{next(_numbers)}"
    setattr(sys.modules[__name__], made.__qualname__, made)
    return made
