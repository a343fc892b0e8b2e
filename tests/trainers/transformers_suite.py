"""transformers' own model tests, from its source distribution, as test cases for one class.

`make test-trainers` unpacks the source distribution of the installed version into `.upstream-tests`. It does not
contain the folders for generation and export, so their tests are left out.
"""

from __future__ import annotations

import copy
import random
import sys
import traceback
import unittest
from dataclasses import dataclass
from enum import StrEnum, auto
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from nrl_models.testing.case import FamilyCase

FOLDER = Path(__file__).parents[2] / ".upstream-tests"
PACKAGE = "transformers_tests"
LENGTH = 8

MISSING_MODULES = {"exporters.test_export": "ExportTesterMixin", "generation.test_utils": "GenerationTesterMixin"}
"""Modules missing from the source distribution, and the class that is imported from each."""


class Outcome(StrEnum):
    """The outcome of a test."""

    PASSED = auto()
    SKIPPED = auto()
    FAILED = auto()


@dataclass(frozen=True)
class Ended:
    """A finished test.

    Args:
        outcome: Its outcome.
        text: The traceback, or the reason for skipping.
        error: The first error that it raised.
    """

    outcome: Outcome
    text: str = ""
    error: BaseException | None = None

    @property
    def last_line(self) -> str:
        """The last line of `text`."""
        return text[-1] if (text := self.text.strip().splitlines()) else ""


@cache
def model_tester_mixin() -> type:
    """Return transformers' `ModelTesterMixin`."""
    sys.path.append(str(FOLDER))  # contains `parameterized`, which the tests import
    package = ModuleType(PACKAGE)
    package.__path__ = [str(FOLDER)]
    sys.modules[PACKAGE] = package
    for module, name in MISSING_MODULES.items():
        folder, _, _ = module.partition(".")
        parent, missing = ModuleType(f"{PACKAGE}.{folder}"), ModuleType(f"{PACKAGE}.{module}")
        parent.__path__ = []
        setattr(missing, name, type(name, (), {}))
        sys.modules[parent.__name__], sys.modules[missing.__name__] = parent, missing
    return import_module(f"{PACKAGE}.test_modeling_common").ModelTesterMixin


class _Tester:
    """The interface through which transformers' tests access a model's configuration and inputs."""

    is_training = True

    def __init__(self, case: FamilyCase) -> None:
        self._case = case
        config = case.config.get_text_config()
        inputs = case.inputs(length=LENGTH)
        self.batch_size, self.seq_length = next(value.shape[:2] for value in inputs.values() if value.ndim == 2)
        self.hidden_size = config.hidden_size
        self.num_hidden_layers = config.num_hidden_layers
        self.num_attention_heads = getattr(config, "num_attention_heads", 0)
        self.key_length = self.encoder_seq_length = self.decoder_seq_length = self.seq_length

    def prepare_config_and_inputs_for_common(self) -> tuple[PreTrainedConfig, dict[str, Any]]:
        return copy.deepcopy(self._case.config), self._case.inputs(length=LENGTH)


def run(case: FamilyCase, model_class: type[PreTrainedModel], name: str) -> Ended:
    """Run one of transformers' tests on a class, with the configuration and inputs of `case`."""

    def set_up(self: Any) -> None:
        self.model_tester = _Tester(case)

    values = {
        "setUp": set_up,
        "all_model_classes": (model_class,),
        "is_encoder_decoder": case.config.is_encoder_decoder,
    }
    tests = type("UpstreamTests", (model_tester_mixin(), unittest.TestCase), values)
    test = tests(name)
    random.seed(0)
    torch.manual_seed(0)
    try:
        test.debug()  # raises errors that a test runner would collect
    except unittest.SkipTest as skip:
        return Ended(Outcome.SKIPPED, str(skip))
    except Exception as error:
        return Ended(Outcome.FAILED, "".join(traceback.format_exception(error)), error)
    finally:
        test.doCleanups()
    return Ended(Outcome.PASSED)


def names_of_tests() -> list[str]:
    """Return the names of transformers' tests."""
    return list(unittest.TestLoader().getTestCaseNames(type("Names", (model_tester_mixin(), unittest.TestCase), {})))
