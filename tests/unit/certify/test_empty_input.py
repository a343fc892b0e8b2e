"""Checks without anything to compare do not pass."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import new_model
from recipe_inputs import byte_tokenizer
from transformers import LlamaConfig

from nrl_models.certify import (
    CheckResult,
    Status,
    all_checks,
    in_loop,
    layer_checks,
    lora,
    running_engine,
    with_engine,
    without_engine,
)
from nrl_models.certify.certified import CheckpointUnderTest, Options
from nrl_models.certify.check_result import answer_of
from nrl_models.diagnostics.result import Diagnosis
from nrl_models.engines.engine_types import Capabilities, Sample
from nrl_models.engines.hf import HFEngine
from nrl_models.onboarding.inspect import ModelKind
from nrl_models.testing.tiny import tiny_config

Prepare = Callable[[pytest.MonkeyPatch, CheckpointUnderTest], None]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("empty") / "tiny"
    config = tiny_config(LlamaConfig)
    config.max_position_embeddings = 160
    model = new_model(config)
    model.save_pretrained(folder)
    byte_tokenizer(model.config).save_pretrained(folder)
    return folder


def no_tensors(patch: pytest.MonkeyPatch, subject: CheckpointUnderTest) -> None:
    model = torch.nn.Module()
    model.config = subject.config
    model.save_pretrained = lambda folder: None
    patch.setitem(subject.__dict__, "model", model)
    patch.setattr(
        without_engine, "auto_class_for", lambda folder: SimpleNamespace(from_pretrained=lambda *a, **k: model)
    )


def no_vocabulary(patch: pytest.MonkeyPatch, subject: CheckpointUnderTest) -> None:
    tokenizer = without_engine.load_tokenizer(subject.folder)
    tokenizer.get_vocab = dict
    patch.setattr(without_engine, "load_tokenizer", lambda folder: tokenizer)


def no_embeddings(patch: pytest.MonkeyPatch, subject: CheckpointUnderTest) -> None:
    found = Diagnosis("embeddings", "tiny", measured={"embeddings": []})
    patch.setattr(without_engine, "diagnose_embeddings", lambda *args, **options: found)


def no_sequences(patch: pytest.MonkeyPatch, subject: CheckpointUnderTest) -> None:
    patch.setattr(without_engine, "SEQUENCES", ((1, 0), (1, 1)))  # one token each, so no log-probabilities


def no_meshes(patch: pytest.MonkeyPatch, subject: CheckpointUnderTest) -> None:
    patch.setattr(without_engine, "MESHES", ())


def no_rows(patch: pytest.MonkeyPatch, subject: CheckpointUnderTest) -> None:
    patch.setattr(without_engine, "check_parity", lambda *args, **options: SimpleNamespace(rows=[], failed=[]))


def declared_drafts_without_tensors(patch: pytest.MonkeyPatch, subject: CheckpointUnderTest) -> None:
    names = SimpleNamespace(known=True, announced=1, key="num_nextn_predict_layers")
    patch.setattr(layer_checks, "MTPNames", lambda model: names)


def no_choices(patch: pytest.MonkeyPatch, subject: CheckpointUnderTest) -> None:
    patch.setattr(layer_checks, "kinds_of", lambda config: [ModelKind.MOE])


def engine(patch: pytest.MonkeyPatch, subject: CheckpointUnderTest, **methods: Any) -> None:
    """Replace the subject's engine by one with these methods."""
    found = HFEngine(copy.deepcopy(subject.trainer.model))
    for name, method in methods.items():
        setattr(found, name, method)
    patch.setitem(subject.__dict__, "engine", found)


def silent_engine(patch: pytest.MonkeyPatch, subject: CheckpointUnderTest) -> None:
    engine(patch, subject, capabilities=lambda: Capabilities(max_length=None))


def empty_samples(*args: Any, **options: Any) -> list[Sample]:
    return [Sample(tuple(prompt), (), ()) for prompt in args[0]]


def no_cached_tokens(patch: pytest.MonkeyPatch, subject: CheckpointUnderTest) -> None:
    engine(patch, subject, capabilities=lambda: Capabilities(prefix_caching=True))
    found = Diagnosis("prefix-caching", "tiny").finish()
    patch.setattr(running_engine, "diagnose_prefix_caching", lambda *args, **options: found)


def no_routes(patch: pytest.MonkeyPatch, subject: CheckpointUnderTest) -> None:
    engine(patch, subject, generate=empty_samples)
    patch.setattr(running_engine, "kinds_of", lambda config: [ModelKind.MOE])


def no_image_tokens(patch: pytest.MonkeyPatch, subject: CheckpointUnderTest) -> None:
    engine(patch, subject, generate=empty_samples, capabilities=lambda: Capabilities(images=True))
    patch.setattr(running_engine, "takes_images", lambda model: True)


def no_cells(patch: pytest.MonkeyPatch, subject: CheckpointUnderTest) -> None:
    report = SimpleNamespace(results=[], error="", settings=SimpleNamespace(cells=list))
    patch.setattr(with_engine, "_matrix", lambda subject: report)


def no_refits(patch: pytest.MonkeyPatch, subject: CheckpointUnderTest) -> None:
    patch.setattr(with_engine, "check_refit", lambda *args, **options: SimpleNamespace(steps=[]))


def no_completions(patch: pytest.MonkeyPatch, subject: CheckpointUnderTest) -> None:
    engine(patch, subject, generate=empty_samples)


def no_syncs(patch: pytest.MonkeyPatch, subject: CheckpointUnderTest) -> None:
    patch.setattr(in_loop, "run_loop", lambda *args, **options: in_loop.Controls())


def no_tokens_at_length(patch: pytest.MonkeyPatch, subject: CheckpointUnderTest) -> None:
    def of_none(subject: CheckpointUnderTest, name: str, results: Any, *rest: Any) -> CheckResult:
        return with_engine.of_cells(subject, name, [], *rest)

    patch.setattr(running_engine, "of_cells", of_none)


def not_started(patch: pytest.MonkeyPatch, subject: CheckpointUnderTest) -> None:
    subject.options = replace(subject.options, engine="vllm")  # the only engine that serves adapters
    patch.setattr(lora, "_with_adapter", lambda subject: subject.trainer.model)
    patch.setattr(lora, "_not_possible", lambda subject: "peft is not installed")


EMPTY: dict[str, Prepare] = {
    "files": no_tensors,
    "tokenizer": no_vocabulary,
    "values": no_tensors,
    "embeddings": no_embeddings,
    "padding": no_sequences,
    "packing": no_sequences,
    "saved files": no_tensors,
    "draft layers": declared_drafts_without_tensors,
    "router replay": no_choices,
    "sharding": no_meshes,
    "weights": no_rows,
    "layers": no_rows,
    "logits": no_rows,
    "gradients": no_rows,
    "engine start": silent_engine,
    "routed experts": no_routes,
    "images": no_image_tokens,
    "prefix caching": no_cached_tokens,
    "longest length": no_tokens_at_length,
    lora.MERGED: no_completions,
    lora.SERVED: not_started,
    with_engine.REFITS[0]: no_refits,
    with_engine.REFITS[1]: no_refits,
    "log-probabilities": no_cells,
    "decode against prefill": no_cells,
    in_loop.ZERO: no_syncs,
    in_loop.SECOND: no_syncs,
}


def test_every_check_has_a_test_with_empty_input() -> None:
    assert list(EMPTY) == list(all_checks.NAMES)


@pytest.mark.parametrize("name", EMPTY)
def test_empty_input_does_not_pass(name: str, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = Options("hf-generate", dtype=torch.float32, in_loop={})
    subject = CheckpointUnderTest(tiny, options, tmp_path)
    EMPTY[name](monkeypatch, subject)
    (check,) = (check for check in all_checks.CHECKS if name in check.names)
    results = {result.name: result for result in all_checks._run(check, subject)}
    result: CheckResult = results[name]
    assert result.status in (Status.NOT_DECIDED, Status.NOT_COVERED), result
    assert not result.compared
    assert answer_of([result]) != "ready"
