"""Checks of rollouts: routed experts, images, prefix caching, adapters, draft layers and the engine's start."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from recipe_inputs import byte_tokenizer
from versions import case_of

from nrl_models.certify import (
    CheckResult,
    Side,
    Status,
    all_checks,
    certified,
    layer_checks,
    lora,
    running_engine,
    with_engine,
)
from nrl_models.certify.certified import CheckpointUnderTest, Options
from nrl_models.common.forward.evaluation import evaluating
from nrl_models.common.forward.routing import record_routing
from nrl_models.consistency import refit
from nrl_models.engines.engine_types import Capabilities, Sample
from nrl_models.engines.hf import HFEngine
from nrl_models.errors import EngineError, EngineUnavailableError, RefitUnsupportedError

DENSE, MIXTURE, IMAGES = "LlamaForCausalLM", "Qwen3MoeForCausalLM", "Qwen2VLForConditionalGeneration"


def subject_of(architecture: str, folder: Path, **engine_options: Any) -> CheckpointUnderTest:
    reference = case_of(architecture).reference()
    reference.save_pretrained(folder / "tiny")
    byte_tokenizer(reference.config).save_pretrained(folder / "tiny")
    options = Options("hf-generate", engine_options, dtype=torch.float32)
    return CheckpointUnderTest(folder / "tiny", options, folder)


@pytest.fixture
def dense(tmp_path: Path) -> Iterator[CheckpointUnderTest]:
    subject = subject_of(DENSE, tmp_path)
    subject.longest = 64
    yield subject
    subject.release_engine()


def only(results: Iterator[CheckResult]) -> CheckResult:
    (result,) = results
    return result


# Routed experts


def report_routes(engine: HFEngine, change: Any = lambda routes: routes) -> None:
    """Make an engine report routed experts, as vLLM does with `enable_return_routed_experts`."""
    generate = engine.generate

    def with_routes(*args: Any, **options: Any) -> list[Sample]:
        return [replace(sample, routed_experts=change(routes(sample))) for sample in generate(*args, **options)]

    def routes(sample: Sample) -> torch.Tensor:
        with record_routing(engine.model) as record, torch.no_grad(), evaluating(engine.model):
            engine.model(input_ids=torch.tensor([sample.sequence[:-1]]), use_cache=False)
        chosen = {int(name.split(".")[2]): choices[-1] for name, choices in record.items()}
        tokens, count = len(sample.sequence) - 1, engine.model.config.num_experts_per_tok
        experts = torch.zeros(tokens, engine.model.config.num_hidden_layers, count, dtype=torch.long)
        for layer, choices in chosen.items():
            experts[:, layer] = choices.reshape(tokens, count)
        return experts

    engine.generate = with_routes  # type: ignore[method-assign]


def other_experts(routes: torch.Tensor) -> torch.Tensor:
    return (routes + 1) % 4


CHANGES = {
    "complete": (lambda routes: routes, Status.PASSED, "all tokens and layers reported"),
    "a token less": (lambda routes: routes[:-1], Status.FAILED, "expected 23"),
    "tokens without experts": (lambda routes: routes.masked_fill(routes == 1, -1), Status.FAILED, "without experts"),
    "one expert twice": (
        lambda routes: torch.cat([routes[:1, :, :1].expand(-1, -1, routes.shape[-1]), routes[1:]]),
        Status.FAILED,
        "chosen twice",
    ),
    "a layer less": (lambda routes: routes[:, :-1], Status.FAILED, "layers"),
    "other experts": (other_experts, Status.FAILED, "replayed in the trainer"),
}


@pytest.mark.long
@pytest.mark.parametrize("name", CHANGES)
def test_routed_experts(name: str, tmp_path: Path) -> None:
    change, status, text = CHANGES[name]
    subject = subject_of(MIXTURE, tmp_path)
    report_routes(subject.engine, change)
    result = only(running_engine.routed_experts(subject))
    assert result.status is status, result
    assert text in result.summary
    assert result.side is (Side.ENGINE if status is Status.FAILED else None)


def test_routed_experts_not_reported_is_not_covered(tmp_path: Path) -> None:
    result = only(running_engine.routed_experts(subject_of(MIXTURE, tmp_path)))
    assert result.status is Status.NOT_COVERED
    assert "enable_return_routed_experts" in result.advice


def test_router_replay(tmp_path: Path, dense: CheckpointUnderTest) -> None:
    assert only(layer_checks.router_replay(subject_of(MIXTURE, tmp_path / "moe"))).status is Status.PASSED
    assert only(layer_checks.router_replay(dense)).status is Status.NOT_APPLICABLE


# Images


def test_images(tmp_path: Path, dense: CheckpointUnderTest) -> None:
    subject = subject_of(IMAGES, tmp_path / "images")
    result = only(running_engine.images(subject))
    assert result.status is Status.PASSED, result
    assert result.compared
    generate = subject.engine.generate

    def darker(*args: Any, model_inputs: Any, **options: Any) -> list[Sample]:
        changed = [{**inputs, "pixel_values": inputs["pixel_values"] * 0.1} for inputs in model_inputs]
        return generate(*args, model_inputs=changed, **options)

    subject.engine.generate = darker  # type: ignore[method-assign]
    result = only(running_engine.images(subject))
    assert (result.status, result.side) == (Status.FAILED, Side.ENGINE), result
    assert only(running_engine.images(dense)).status is Status.NOT_APPLICABLE


# Prefix caching


def test_prefix_caching(dense: CheckpointUnderTest) -> None:
    assert only(running_engine.prefix_caching(dense)).status is Status.NOT_APPLICABLE
    capabilities, generate, calls = dense.engine.capabilities(), dense.engine.generate, []
    dense.engine.capabilities = lambda: replace(capabilities, prefix_caching=True)  # type: ignore[method-assign]
    assert only(running_engine.prefix_caching(dense)).status is Status.PASSED

    def stale(*args: Any, **options: Any) -> list[Sample]:
        calls.append(args)
        samples = generate(*args, **options)
        if len(calls) == 1:
            return samples
        return [replace(sample, logprobs=tuple(value - 0.2 for value in sample.logprobs)) for sample in samples]

    dense.engine.generate = stale  # type: ignore[method-assign]
    result = only(running_engine.prefix_caching(dense))
    assert (result.status, result.side) == (Status.FAILED, Side.ENGINE), result


# Length


def test_engine_exceeding_max_length_fails(dense: CheckpointUnderTest) -> None:
    assert only(running_engine.longest_length(dense)).length == 64
    engine, generate = dense.engine, dense.engine.generate
    capabilities = engine.capabilities()
    engine.capabilities = lambda: replace(capabilities, own_limit=True, max_length=64)  # type: ignore[method-assign]

    def beyond(prompts: Any, *args: Any, max_new_tokens: int, beyond_limit: bool = False, **options: Any) -> Any:
        more = 8 if beyond_limit else max_new_tokens
        return generate(prompts, *args, max_new_tokens=more, beyond_limit=beyond_limit, **options)

    engine.generate = beyond  # type: ignore[method-assign]
    result = only(running_engine.longest_length(dense))
    assert (result.status, result.side) == (Status.FAILED, Side.ENGINE), result
    assert "68 tokens, and max_model_len is 64" in result.summary


# Adapters


def test_merged_adapter_passes(dense: CheckpointUnderTest) -> None:
    result = only(lora.merged(dense))
    assert result.status is Status.PASSED, result
    assert "engine" not in dense.__dict__, "the adapter's weights would leak into the next check"


def test_dropped_adapter_fails(dense: CheckpointUnderTest) -> None:
    model = dense.trainer.model
    base = {name: tensor.clone() for name, tensor in model.state_dict_adapter.iter_export(model)}
    refit = dense.engine.refit
    dense.engine.refit = lambda tensors, **options: refit(  # type: ignore[method-assign]
        ((name, base[name]) for name, _ in tensors), **options
    )
    result = only(lora.merged(dense))
    assert (result.status, result.side) == (Status.FAILED, Side.ENGINE)
    assert "the engine computes without the adapter" in result.summary


class ExternalEngine(HFEngine):
    """Stand-in for vLLM in another environment, which supports neither refits nor adapters."""

    closed = False

    def capabilities(self) -> Capabilities:
        return replace(super().capabilities(), refit=False)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def started(dense: CheckpointUnderTest, monkeypatch: pytest.MonkeyPatch) -> list[ExternalEngine]:
    """Engines returned by `start_engine`."""
    engines: list[ExternalEngine] = []

    def start(name: str, path: Path, **options: Any) -> ExternalEngine:
        engines.append(ExternalEngine(HFEngine.start(path, dtype=torch.float32).model))
        return engines[-1]

    monkeypatch.setattr(certified, "start_engine", start)
    monkeypatch.setattr(refit, "start_engine", start)
    return engines


def test_adapter_serving_in_external_environment_is_not_covered(
    dense: CheckpointUnderTest, started: list[ExternalEngine]
) -> None:
    dense.options = replace(dense.options, engine="vllm", engine_options={"python": "/venv"})
    result = only(lora.served(dense))
    assert result.status is Status.NOT_COVERED
    assert "another environment" in result.summary
    assert not started
    dense.options = replace(dense.options, engine_options={})
    assert only(lora.served(dense)).status is Status.NOT_COVERED
    assert all(engine.closed for engine in started)


def test_engine_without_refit_support_is_not_covered(dense: CheckpointUnderTest, started: list[ExternalEngine]) -> None:
    (check,) = (check for check in all_checks.CHECKS if check.names == with_engine.REFITS)
    assert only(lora.merged(dense)).status is Status.NOT_COVERED
    results = all_checks._run(check, dense)
    assert [result.status for result in results] == [Status.LEFT_OUT] * 2
    assert "does not support new weights here" in results[0].summary
    assert started[-1].closed


@pytest.mark.parametrize("names", [(lora.MERGED,), with_engine.REFITS])
def test_server_without_refit_routes_is_left_out(
    names: tuple[str, ...], dense: CheckpointUnderTest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server answers 404 when the first weights are sent."""

    def refit(self: HFEngine, *args: Any, **options: Any) -> Any:
        raise RefitUnsupportedError("answered 404 to /weight_info")

    monkeypatch.setattr(HFEngine, "refit", refit)
    (check,) = (check for check in all_checks.CHECKS if check.names == names)
    assert {result.status for result in all_checks._run(check, dense)} == {Status.LEFT_OUT}


# Start


@pytest.mark.parametrize(
    ("error", "status", "side"),
    [(EngineUnavailableError, Status.NOT_DECIDED, None), (EngineError, Status.FAILED, Side.ENGINE)],
)
def test_engine_start_error(
    error: type[EngineError],
    status: Status,
    side: Side | None,
    dense: CheckpointUnderTest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start(*args: Any, **options: Any) -> HFEngine:
        raise error("no such option")

    monkeypatch.setattr(HFEngine, "start", start)
    result = only(running_engine.engine_start(dense))
    assert (result.status, result.side) == (status, side)


@pytest.mark.parametrize(
    ("capabilities", "text"),
    [
        ({"dtype": torch.bfloat16}, "dtype bfloat16, expected float32"),
        ({"vocabulary": 100}, "vocabulary 100, expected 512"),
        ({"max_length": 32}, "maximum length 32, expected 64"),
    ],
)
def test_engine_with_wrong_capabilities_fails(
    capabilities: dict[str, Any], text: str, dense: CheckpointUnderTest
) -> None:
    facts = replace(dense.engine.capabilities(), **capabilities)
    dense.engine.capabilities = lambda: facts  # type: ignore[method-assign]
    result = only(running_engine.engine_start(dense))
    assert (result.status, result.side, result.summary) == (Status.FAILED, Side.ENGINE, text)
    assert isinstance(facts, Capabilities)


# Refit


@pytest.mark.long
def test_refit_summary_without_digests(
    dense: CheckpointUnderTest, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refit = HFEngine._refit
    monkeypatch.setattr(HFEngine, "_refit", lambda self, sent, digests: refit(self, sent, digests) | {"digests": {}})
    results = list(with_engine.refits(dense))
    assert [result.status for result in results] == [Status.PASSED, Status.PASSED]
    for result in results:
        assert result.summary.endswith("the engine reports no digests of received weights")
    assert caplog.text.count("log-probabilities compare the weights instead") == 1
