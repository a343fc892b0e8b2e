import enum

from .matrix import check_consistency
from .refit import check_refit
from .vision.image_check import check_images

__all__ = ["Data", "Mode", "check_consistency", "check_images", "check_refit"]

class Data(enum.StrEnum):
    REAL = "real"
    DUMMY = "dummy"

class Mode(enum.StrEnum):
    GREEDY = "greedy"
    SAMPLING = "sampling"
