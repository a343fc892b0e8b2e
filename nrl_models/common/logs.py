"""Loggers whose messages show what a terminal would act on, as errors do."""

from __future__ import annotations

import logging
from typing import Any

from transformers.utils import logging as upstream

from nrl_models.errors import visible


def get_logger(name: str) -> Any:
    """transformers' logger of this name; control characters in its messages, a tensor's name say, are escaped."""
    logger = upstream.get_logger(name)
    logger.addFilter(_Escape())
    return logger


class _Escape(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = visible(record.getMessage()), None
        return True
