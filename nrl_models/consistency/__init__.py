"""Check that training and inference agree: a matrix of checks, verdicts on disagreements, and refits.

Follows NeMo RL's guide for new models. For each combination of length, data, sampling and batch size, the same tokens
are scored by the engine while decoding, by the engine in one prefill, and by the trainer.
"""

from enum import StrEnum

__all__ = ["Data", "Mode"]


class Data(StrEnum):
    """Source of prompts."""

    REAL = "real"
    DUMMY = "dummy"


class Mode(StrEnum):
    """How tokens are generated."""

    GREEDY = "greedy"
    SAMPLING = "sampling"
