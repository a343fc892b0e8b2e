"""Tiny checkpoints to certify, and the small settings that make a campaign run in minutes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from recipe_inputs import byte_tokenizer

from nrl_models import registry
from nrl_models.certify import Certificate, CheckResult, Status, certified, certify, with_engine
from nrl_models.consistency import prompts
from nrl_models.inputs.real_text import prose_of_this_machine
from nrl_models.inputs.tokenizers import as_ids
from nrl_models.loading.read_config import read_config
from nrl_models.testing.case import FamilyCase

BYTES = range(16, 16 + 256)
"""Token ids of the tokenizer's bytes. An end token among them would be two tokens."""

SPREAD = 2.0
"""Factor of the output embedding: logits of random weights differ by too little to show faults."""


@cache
def case_of(architecture: str) -> FamilyCase:
    return FamilyCase(registry.model_class(architecture))


def save_tiny(architecture: str, folder: Path) -> Path:
    """Save a tiny model of an architecture with a tokenizer."""
    reference = case_of(architecture).reference()
    head = reference.get_output_embeddings()
    with torch.no_grad():
        head.weight.mul_(SPREAD)
        reference.save_pretrained(folder)
        head.weight.div_(SPREAD)
    text = reference.config.get_text_config()
    if text.eos_token_id is not None and as_ids(text.eos_token_id)[0] in BYTES:
        for name in ("config.json", "generation_config.json"):
            if (folder / name).is_file():
                content = (folder / name).read_text()
                (folder / name).write_text(re.sub(r'"eos_token_id": (\d+|\[[^]]*\])', '"eos_token_id": 1', content))
    config = read_config(folder)
    used = byte_tokenizer(config).get_vocab().values()
    # Without gaps, because some tokenizer classes give their end token the number of tokens as id.
    gaps = {f"<|{number}|>": number for number in range(BYTES.stop) if number not in used}
    byte_tokenizer(config, gaps).save_pretrained(folder)
    return folder


@contextmanager
def small_settings() -> Iterator[None]:
    """Check sequences of 64 tokens, and prompts from a short text."""
    text = prose_of_this_machine()[:200_000]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prompts, "prose_of_this_machine", lambda: text)
        patch.setattr(with_engine, "LENGTHS", (64,))
        patch.setattr(certified, "LONGEST", 128)
        yield


class FailedError(Exception):
    """A check failed. The campaign does not run the others."""


def first_failure(folder: Path, out: Path, **options: Any) -> CheckResult | Certificate:
    """Certify a checkpoint up to the first failure. Returns that result, or the certificate if nothing failed."""
    found: list[CheckResult] = []

    def progress(name: str, results: list[CheckResult]) -> None:
        found[:] = results
        if any(result.status is Status.FAILED for result in results):
            raise FailedError

    try:
        certificate = certify(
            folder, dtype=torch.float32, out=out, progress=progress, **{"engine": "hf-generate"} | options
        )
    except FailedError:
        return next(result for result in found if result.status is Status.FAILED)
    return next(iter(certificate.with_status(Status.FAILED)), certificate)


Edit = Callable[[Path], object]
"""Changes a checkpoint in place."""
