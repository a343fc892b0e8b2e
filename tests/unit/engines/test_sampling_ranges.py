"""Sampling parameters and end tokens have the same meaning in every engine, or raise an error."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from completions_server import serving
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from nrl_models.common.checkpoint.resolve_folder import folder_on_disk
from nrl_models.engines import start_engine
from nrl_models.engines.base import Engine
from nrl_models.engines.engine_types import VLLM_TEMPERATURES, Capabilities, Sample
from nrl_models.engines.hf import HFEngine
from nrl_models.engines.http import HTTPEngine
from nrl_models.engines.http_probes import NEUTRAL, ServerProbes
from nrl_models.errors import CheckpointError, ConfigurationError, EngineError, NRLModelsError, SamplingError
from nrl_models.inputs.tokenizers import end_tokens
from nrl_models.loading.read_config import read_config
from nrl_models.logprobs import Sampling


@pytest.fixture
def folder(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint, to change its configuration files."""
    return shutil.copytree(checkpoint, tmp_path / "copy")


def with_defaults(folder: Path, **defaults: Any) -> None:
    file = folder / "generation_config.json"
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(content | {"do_sample": True} | defaults))


@pytest.mark.long
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.7, top_k=30, top_p=0.9)], ids=str)
def test_server_defaults_do_not_apply(
    folder: Path, trainer: HFEngine, prompts: list[list[int]], sampling: Sampling
) -> None:
    with serving(HFEngine.start(folder, dtype=torch.float32)) as (address, served):
        served.defaults = {"top_k": 3, "top_p": 0.5, "temperature": 0.3}
        with_defaults(folder, **served.defaults, min_p=0.2, repetition_penalty=1.3)
        engine = start_engine(address, folder)
        samples = engine.generate(prompts, sampling, max_new_tokens=9, seed=4)
        bodies = [body for body in served.requests if body["max_tokens"] == 9]
        parameters = NEUTRAL | {"top_k": sampling.top_k, "top_p": sampling.top_p, "temperature": sampling.temperature}
        assert len(bodies) == len(prompts)
        assert all(body.items() >= parameters.items() for body in bodies)
        engine.score(prompts, Sampling())
        assert served.requests[-1].items() >= NEUTRAL.items()
    for sample, score in zip(samples, trainer.score([each.sequence for each in samples], sampling), strict=True):
        assert score[len(sample.prompt) :] == pytest.approx(sample.logprobs, abs=1e-4)


@pytest.mark.long
@pytest.mark.parametrize(("name", "value"), [("top_k", 3), ("top_p", 0.5)])
def test_server_default_without_override_raises(
    folder: Path, prompts: list[list[int]], name: str, value: float
) -> None:
    with serving(HFEngine.start(folder, dtype=torch.float32)) as (address, served):
        served.defaults, served.ignored = {name: value}, (name,)
        assert len(start_engine(address, folder).generate(prompts, Sampling(), max_new_tokens=2)) == 3  # unknown key
        with_defaults(folder, **served.defaults)
        engine = start_engine(address, folder)
        for _ in range(2):
            with pytest.raises(
                EngineError, match=rf"does not read {name}, .*generation_config.json sets {name}={value}"
            ):
                engine.generate(prompts, Sampling(), max_new_tokens=2)
        served.ignored = ()
        assert len(engine.generate(prompts, Sampling(), max_new_tokens=2)) == 3


UNPROCESSED: dict[str, Callable[[Sampling], Sampling]] = {
    "raw": lambda sampling: Sampling(),
    "without truncation": lambda sampling: Sampling(sampling.temperature),
}


@pytest.mark.long
@pytest.mark.parametrize("reported", UNPROCESSED)
def test_server_reporting_unprocessed_logprobs_raises(
    reported: str, checkpoint: Path, prompts: list[list[int]]
) -> None:
    """By default, vLLM reports log-probabilities from before temperature and truncation."""
    with serving(HFEngine.start(checkpoint, dtype=torch.float32)) as (address, served):
        served.reported = UNPROCESSED[reported]
        engine = start_engine(address, checkpoint)
        engine.generate(prompts, Sampling(), max_new_tokens=2)
        engine.generate(prompts, Sampling(0.0), max_new_tokens=2)
        for sampling in (Sampling(0.7), Sampling(1.4), Sampling(top_k=20), Sampling(top_p=0.9), Sampling(0.7, 5, 0.9)):
            before = "temperature" if reported == "raw" and sampling.temperature != 1.0 else "truncation"
            if reported == "raw" or sampling.truncates:
                with pytest.raises(
                    EngineError, match=rf"log-probabilities from before {before}, .* processed_logprobs"
                ):
                    engine.generate(prompts, sampling, max_new_tokens=2)
            else:
                engine.generate(prompts, sampling, max_new_tokens=2)
        served.reported = lambda sampling: sampling
        assert len(engine.generate(prompts, Sampling(0.7, 5, 0.9), max_new_tokens=2)) == len(prompts)


def test_deterministic_continuations_do_not_pass_probe(checkpoint: Path, prompts: list[list[int]]) -> None:
    model = HFEngine.start(checkpoint, dtype=torch.float32)
    starts = {tuple(prompts[0]), *((token,) for prompt in prompts for token in prompt[:2])}
    with serving(model) as (address, served):
        served.reported = lambda sampling: Sampling()
        original = served.complete

        def complete(body: dict[str, Any]) -> dict[str, Any]:
            answer = original(body)
            if tuple(body["prompt"][0]) in starts:
                for choice in answer["choices"]:
                    choice["logprobs"]["token_logprobs"] = [0.0] * len(choice["logprobs"]["token_logprobs"])
            return answer

        served.complete = complete  # type: ignore[method-assign]
        with pytest.raises(EngineError, match="log-probabilities from before temperature"):
            start_engine(address, checkpoint).generate(prompts, Sampling(0.7), max_new_tokens=2)


@pytest.mark.parametrize(("reason", "tokens"), [("abort", 3), ("error", 0), (None, 2)])
def test_unfinished_completion_raises(
    checkpoint: Path, prompts: list[list[int]], reason: str | None, tokens: int
) -> None:
    with serving(HFEngine.start(checkpoint, dtype=torch.float32)) as (address, served):

        def interrupted(choice: dict[str, Any]) -> dict[str, Any]:
            logprobs = {name: values[:tokens] for name, values in choice["logprobs"].items()}
            changes = {"finish_reason": reason, "token_ids": choice["token_ids"][:tokens], "logprobs": logprobs}
            return choice | changes

        served.change = interrupted
        with pytest.raises(EngineError, match=f"finish_reason '{reason or 'unfinished'}', .*generate them again"):
            start_engine(address, checkpoint).generate(prompts, Sampling(), max_new_tokens=8, ignore_end=False)


class Reporting:
    """An engine over HTTP with fixed log-probabilities of greedy decoding, and of the probe."""

    address = "http://server"

    def __init__(self, greedy: tuple[float, ...], probe: tuple[float, ...]) -> None:
        self.greedy, self.probe = greedy, probe

    def request_samples(self, prompts: Any, sampling: Sampling, **_: Any) -> list[Sample]:
        logprobs = self.greedy if sampling.greedy else self.probe
        return [Sample((1,), tuple(range(len(logprobs))), logprobs, "length")]


@pytest.mark.parametrize(
    ("greedy", "probe", "is_processed"),
    [
        ((-1.2, -0.693, -2.1), (0.0, -0.693, 0.0), True),  # two equally likely tokens have all the probability
        ((-1.2, -0.693, -2.1), (-1.21, -0.69, -2.07), False),  # the noise of bf16
        ((0.0, 0.0, 0.0), (0.0, 0.0, 0.0), True),  # tokens with probability 1 give no information
    ],
)
def test_probe_detects_unprocessed_logprobs(
    greedy: tuple[float, ...], probe: tuple[float, ...], is_processed: bool
) -> None:
    engine: Any = Reporting(greedy, probe)
    with nullcontext() if is_processed else pytest.raises(EngineError, match="from before temperature"):
        ServerProbes(engine, {}).require([[1]], Sampling(0.7))


class VLLMTemperatureEngine(Engine):
    """An engine with vLLM's temperature range."""

    name = "ranged"

    def capabilities(self) -> Capabilities:
        return Capabilities(min_temperature=VLLM_TEMPERATURES[0], max_temperature=VLLM_TEMPERATURES[1])

    def _generate(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("called")


@pytest.mark.parametrize("temperature", [1e-4, 0.005, 2.0001, 5.0])
def test_temperature_outside_vllm_range_raises(temperature: float, checkpoint: Path) -> None:
    message = rf"temperature={temperature:g}: \w+ samples at 0 \(greedy\) and at temperatures from 0.01 to 2"
    with pytest.raises(EngineError, match=message):
        VLLMTemperatureEngine().generate([[1, 2]], Sampling(temperature), max_new_tokens=1)
    with serving(HFEngine.start(checkpoint, dtype=torch.float32)) as (address, _):
        engine = start_engine(address, checkpoint)
        with pytest.raises(EngineError, match=message):
            engine.generate([[1, 2]], Sampling(temperature), max_new_tokens=1)


def test_transformers_low_temperature_is_exact(engine: HFEngine, prompts: list[list[int]]) -> None:
    (sample,) = engine.generate(prompts[:1], Sampling(0.005), max_new_tokens=4)
    scores = engine.score([sample.sequence], Sampling(0.005))[0][-4:]
    assert list(sample.logprobs) == pytest.approx(scores, abs=1e-3)
    with pytest.raises(SamplingError, match=r"temperature=1e-300: .* the lowest is 1e-06"):
        engine.generate(prompts[:1], Sampling(1e-300), max_new_tokens=4)


@pytest.mark.parametrize("count", [0, -1, 2.5, None, True])
def test_invalid_max_new_tokens_raises(engine: HFEngine, prompts: list[list[int]], count: Any) -> None:
    with pytest.raises(EngineError, match=r"max_new_tokens=\S+: expected a whole number of at least 1"):
        engine.generate(prompts, Sampling(), max_new_tokens=count)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", value) for value in (-0.1, float("nan"), float("inf"), "1", None)),
        *(("top_k", value) for value in (-1, 2.5, "5")),
        *(("top_p", value) for value in (0.0, 1.1, float("nan"), [1])),
    ],
)
def test_sampling_out_of_range_raises_sampling_error(name: str, value: Any) -> None:
    with pytest.raises(SamplingError, match=rf"^{name}=.*: expected") as raised:
        Sampling(**{name: value})
    assert isinstance(raised.value, ValueError)
    assert isinstance(raised.value, NRLModelsError)


def test_tokenizer_eos_token_stops_every_engine(folder: Path, prompts: list[list[int]]) -> None:
    with HFEngine.start(folder, dtype=torch.float32) as engine:
        (unstopped,) = engine.generate(prompts[:1], Sampling(0.0), max_new_tokens=6, ignore_end=False)
    assert unstopped.finish_reason == "length"
    end = unstopped.tokens[2]
    tokenizer = Tokenizer(models.WordLevel({f"t{token}": token for token in range(512)}, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=f"t{end}").save_pretrained(folder)
    with_defaults(folder, eos_token_id=[1, 2])
    eos_token_ids = tuple(sorted({1, 2, end}))
    assert end_tokens(folder, read_config(folder)) == eos_token_ids
    with serving(HFEngine.start(folder, dtype=torch.float32)) as (address, served):
        engines = [HFEngine.start(folder, dtype=torch.float32), start_engine(address, folder)]
        for engine in engines:
            (stopped,) = engine.generate(prompts[:1], Sampling(0.0), max_new_tokens=6, ignore_end=False)
            assert (stopped.tokens, stopped.finish_reason) == (
                unstopped.tokens[: unstopped.tokens.index(end) + 1],
                "stop",
            )
            assert engine.generate(prompts[:1], Sampling(0.0), max_new_tokens=6)[0].tokens == unstopped.tokens
        assert served.requests[0]["stop_token_ids"] == list(eos_token_ids)


def test_eos_token_from_hub_cache(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "models--owner--tiny" / "snapshots" / ("a" * 40)
    (tmp_path / "models--owner--tiny" / "refs").mkdir(parents=True)
    (tmp_path / "models--owner--tiny" / "refs" / "main").write_text("a" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    tokenizer = Tokenizer(models.WordLevel({f"t{token}": token for token in range(512)}, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="t9").save_pretrained(folder)
    shutil.copytree(folder, snapshot)
    assert folder_on_disk("owner/tiny") == snapshot
    engine = HFEngine.start(folder, dtype=torch.float32)
    engine.model.name_or_path = "owner/tiny"
    assert engine._tokenizer_ends == (9,)
    assert folder_on_disk("owner/other") is None
    assert folder_on_disk("") is None


@pytest.mark.parametrize(
    "content",
    ["{", "[]", "null", *(f'{{"eos_token_id": {value}}}' for value in ('"a"', '["a"]', '{"a": 1}', "1.5", "[[2]]"))],
)
def test_invalid_generation_config_raises(content: str, folder: Path, prompts: list[list[int]]) -> None:
    config = read_config(folder)
    (folder / "generation_config.json").write_text(content)
    with pytest.raises((CheckpointError, ConfigurationError), match=r"generation_config\.json"):
        end_tokens(folder, config)
    with pytest.raises((CheckpointError, ConfigurationError), match=r"generation_config\.json"):
        HTTPEngine.start(folder, address="http://127.0.0.1:9")
    # transformers ignores or rejects some of these files.
    with suppress(NRLModelsError):
        HFEngine.start(folder).generate(prompts, Sampling(), max_new_tokens=2, ignore_end=False)


def test_negative_eos_token_is_ignored(folder: Path) -> None:
    with_defaults(folder, eos_token_id=[-1, 5])
    assert end_tokens(folder, read_config(folder)) == (5,)


def test_eos_token_outside_vocabulary_is_ignored(folder: Path) -> None:
    """vLLM rejects requests with such a token."""
    config = read_config(folder)
    with_defaults(folder, eos_token_id=[5, config.vocab_size])
    assert end_tokens(folder, config) == (5,)


@pytest.mark.parametrize("tokens", ["text", [20.5], [True], [20, None], torch.tensor([20, 21]), None, 5])
def test_invalid_token_ids_raise(engine: HFEngine, tokens: Any) -> None:
    for call in (engine.generate, engine.score):
        more = {"max_new_tokens": 2} if call == engine.generate else {}
        with pytest.raises(EngineError, match=r"sequence 1 is .*: expected a list of token ids"):
            call([[20, 21], tokens], Sampling(), **more)
        with pytest.raises(
            EngineError, match=r"expects a list of token id lists, and got|expected a list of token ids"
        ):
            call(tokens, Sampling(), **more)
        with pytest.raises(EngineError, match=r"sampling=.*: .* expects a Sampling"):
            call([[20, 21]], tokens, **more)


@pytest.mark.parametrize("seed", [None, "a", 1.5, True, 2**70])
def test_invalid_seed_raises(engine: HFEngine, seed: Any) -> None:
    with pytest.raises(EngineError, match=r"seed=.*: expected a whole number"):
        engine.generate([[20, 21]], Sampling(), max_new_tokens=2, seed=seed)


@pytest.mark.parametrize("last", [-1, "1", 1.0, True])
def test_invalid_last_raises(engine: HFEngine, last: Any) -> None:
    with pytest.raises(EngineError, match=r"last=.*: expected a number of tokens"):
        engine.score([[20, 21]], Sampling(), last=last)


@pytest.mark.parametrize("name", [None, 5])
def test_invalid_engine_name_raises(name: Any) -> None:
    with pytest.raises(EngineError, match=f"unknown engine {name}: expected one of"):
        start_engine(name, "nowhere")
