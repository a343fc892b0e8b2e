"""Check that training and inference agree: a matrix of checks, verdicts on disagreements, and refits.

Follows NeMo RL's guide for new models. For each combination of length, data, sampling and batch size, the same tokens
are scored by the engine while decoding, by the engine in one prefill, and by the trainer.

The public functions are in `__init__.pyi`; each is imported when it is first used, so that the command line needs no
torch.
"""

from enum import StrEnum

import lazy_loader

__getattr__, _, __all__ = lazy_loader.attach_stub(__name__, __file__)
__all__ += ["Data", "Mode"]


def __dir__() -> list[str]:
    return list(__all__)


class Data(StrEnum):
    """Source of prompts."""

    REAL = "real"
    DUMMY = "dummy"


class Mode(StrEnum):
    """How tokens are generated."""

    GREEDY = "greedy"
    SAMPLING = "sampling"
