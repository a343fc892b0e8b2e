"""Loggers that escape control characters, as errors do."""

from __future__ import annotations

import logging
from typing import Any

from transformers.utils import logging as upstream

from nrl_models.errors import visible


def get_logger(name: str) -> Any:
    """Return transformers' logger of this name. Escapes control characters in messages, such as in tensor names."""
    logger = upstream.get_logger(name)
    logger.addFilter(_Escape())
    return logger


class _Escape(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = visible(record.getMessage()), None
        return True
