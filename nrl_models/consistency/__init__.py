"""Check that training and inference agree: a matrix of checks, verdicts on disagreements, and refits.

Follows NeMo RL's guide for new models. For each combination of length, data, sampling and batch size, the same tokens
are scored by the engine while decoding, by the engine in one prefill, and by the trainer.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

import lazy_loader

if TYPE_CHECKING:
    from nrl_models.consistency.matrix import check_consistency
    from nrl_models.consistency.refit import check_refit
    from nrl_models.consistency.vision.image_check import check_images

__all__ = ["Data", "Mode", "check_consistency", "check_images", "check_refit"]

__getattr__, _, _ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "matrix": ["check_consistency"],
        "refit": ["check_refit"],
        "vision.image_check": ["check_images"],
    },
)
"""The functions are imported when they are first used, so that the command line needs no torch."""


def __dir__() -> list[str]:
    return [*globals(), *__all__]


class Data(StrEnum):
    """Source of prompts."""

    REAL = "real"
    DUMMY = "dummy"


class Mode(StrEnum):
    """How tokens are generated."""

    GREEDY = "greedy"
    SAMPLING = "sampling"
