"""Refits that are incomplete or have unsupported values or dtypes, and calls interrupted by an exception."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from vllm.model_executor.model_loader.reload.layerwise import record_metadata_for_reloading

from nrl_models.engines.engine_types import NamedTensor
from nrl_models.engines.hf import HFEngine
from nrl_models.engines.transfer.reload import WeightReload
from nrl_models.engines.vllm import VLLMEngine
from nrl_models.errors import EngineError, MixedWeightsError
from nrl_models.logprobs import Sampling
from tests.engine.families import tiny_model
from tests.engine.image_processors import save_processor
from tests.engine.inside import model_of
from tests.engine.one_engine import OneEngine
from tests.engine.published import BF16

PROMPTS = [list(range(50, 80)), list(range(120, 150))]
MIXTURE, LINEAR, VISION = "Qwen3MoeForCausalLM", "Qwen3_5ForCausalLM", "LlavaForConditionalGeneration"
FUSED = {
    "LlamaForCausalLM": ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"],
    MIXTURE: ["k_proj", "experts.1.gate_proj", "experts.1.up_proj", "experts.0.down_proj", "experts.2."],
}
CASES = [(architecture, part) for architecture, parts in FUSED.items() for part in parts]

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
MORE_FUSED = {
    "Qwen2ForCausalLM": [f"layers.0.{name}.{kind}" for name in QKV for kind in ("weight", "bias")],
    "MixtralForCausalLM": [f"experts.0.w{number}.weight" for number in (1, 2, 3)],
    "DeepseekV3ForCausalLM": [
        *(f"self_attn.{name}.weight" for name in ("q_a_proj", "kv_a_proj_with_mqa")),
        *(f"shared_experts.{name}.weight" for name in ("gate_proj", "up_proj")),
    ],
    LINEAR: [f"linear_attn.in_proj_{name}.weight" for name in ("qkv", "z", "b", "a")],
    VISION: [f"encoder.layers.0.{name}.{kind}" for name in QKV for kind in ("weight", "bias")],
}
"""More tensors that vLLM fuses with others: the ends of their names. One layer lacks each."""


class Pair:
    """A trainer, and an engine on its checkpoint."""

    def __init__(self, architecture: str, vllm: OneEngine, folder: Path, **overrides: Any) -> None:
        self.model = tiny_model(architecture, overrides)
        self.model.save_pretrained(folder)
        self._vllm, self._folder = vllm, folder

    @property
    def engine(self) -> VLLMEngine:
        return self._vllm(self._folder)

    def weights(self, factor: float = 1.0) -> list[NamedTensor]:
        return [(name, tensor * factor) for name, tensor in self.model.state_dict_adapter.iter_export(self.model)]

    def max_difference(self) -> float:
        """Return the largest difference between log-probabilities of trainer and engine."""
        sides = HFEngine(self.model, "trainer"), self.engine
        ours, theirs = (torch.tensor([row[1:] for row in side.score(PROMPTS, Sampling())]) for side in sides)
        return float((ours - theirs).abs().max())


@pytest.fixture(scope="module")
def pair_of(vllm: OneEngine, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Pair]:
    pairs: dict[str, Pair] = {}

    def pair(architecture: str) -> Pair:
        if architecture not in pairs:
            pairs[architecture] = Pair(architecture, vllm, tmp_path_factory.mktemp(architecture))
        return pairs[architecture]

    return pair


@pytest.mark.parametrize(("architecture", "part"), CASES)
def test_refit_with_incomplete_fused_tensor_raises(
    pair_of: Callable[[str], Pair], architecture: str, part: str
) -> None:
    pair = pair_of(architecture)
    engine = pair.engine
    missing = [
        name for name, _ in pair.weights() if f"layers.1.{'mlp' if 'exp' in part else ''}" in name and part in name
    ]
    assert missing
    previous_weights = {name: tensor.clone() for name, tensor in model_of(engine).state_dict().items()}
    with pytest.raises(MixedWeightsError, match=r"left \d tensors unwritten: model.layers.1.*not sent") as raised:
        engine.refit((name, tensor) for name, tensor in pair.weights(1.01) if name not in missing)
    if "experts" not in part:
        assert f"without {part}, " in str(raised.value)
    # The module keeps its previous weights, not uninitialized memory.
    after = model_of(engine).state_dict()
    fused = next(name for name in after if "layers.1" in name and name in str(raised.value))
    torch.testing.assert_close(after[fused], previous_weights[fused], rtol=0, atol=0)
    with pytest.raises(MixedWeightsError):
        engine.score(PROMPTS, Sampling())
    engine.refit(pair.weights())
    assert pair.max_difference() < 1e-4


@pytest.mark.parametrize("architecture", MORE_FUSED)
def test_refits_without_parts_of_fused_tensors_raise(architecture: str, vllm: OneEngine, tmp_path: Path) -> None:
    """The parts are biases, experts, shared experts, latent and linear attention, and a vision tower."""
    dtype = torch.bfloat16 if architecture in BF16 else torch.float32
    model = tiny_model(architecture, dtype=dtype)
    model.save_pretrained(tmp_path)
    if architecture == VISION:
        save_processor(model.config, tmp_path)
    engine = vllm(tmp_path, dtype=dtype, load_format="dummy", language_model_only=architecture != VISION)
    weights = dict(model.state_dict_adapter.iter_export(model))
    engine.refit(weights.items())
    scores = engine.score(PROMPTS, Sampling())
    for part in MORE_FUSED[architecture]:
        missing = next(name for name in weights if name.endswith(part))
        with pytest.raises(MixedWeightsError, match=r"left \d+ tensors unwritten: .*elements not sent"):
            engine.refit((name, tensor) for name, tensor in weights.items() if name != missing)
    engine.refit(weights.items())
    assert engine.score(PROMPTS, Sampling()) == scores


def test_refit_with_reused_buffers_raises(pair_of: Callable[[str], Pair]) -> None:
    """vLLM keeps tensors of a layer until it has all of them, also after their bucket. Two buffers are too few."""
    pair = pair_of("LlamaForCausalLM")
    buffers = [torch.empty(max(tensor.numel() for _, tensor in pair.weights())) for _ in range(2)]

    def reused() -> Iterator[NamedTensor]:
        for index, (name, tensor) in enumerate(pair.weights(1.01)):
            yield name, buffers[index % 2][: tensor.numel()].view(tensor.shape).copy_(tensor)

    with pytest.raises(EngineError, match=r"proj.*was changed after the generator yielded it, before its layer was"):
        pair.engine.refit(reused(), bucket_bytes=1)
    pair.engine.refit(pair.weights(), bucket_bytes=1)
    assert pair.max_difference() < 1e-4


def test_refit_from_one_buffer(pair_of: Callable[[str], Pair]) -> None:
    """Tensors next to each other in a buffer share its version, so that each write seems to change all of them."""
    pair = pair_of("LlamaForCausalLM")
    buffer = torch.empty(sum(tensor.numel() for _, tensor in pair.weights()))

    def packed() -> Iterator[NamedTensor]:
        start = 0
        for name, tensor in pair.weights():
            yield name, buffer[start : start + tensor.numel()].view(tensor.shape).copy_(tensor)
            start += tensor.numel()

    pair.engine.refit(packed(), bucket_bytes=1)
    assert pair.max_difference() < 1e-4


def test_second_start_abandons_first_refit(pair_of: Callable[[str], Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer may die during a refit. Hooks of its refit must not stay."""
    pair, abandoned, abandon = pair_of("LlamaForCausalLM"), [], WeightReload.abandon
    monkeypatch.setattr(WeightReload, "abandon", lambda self: abandoned.append(self) or abandon(self))
    pair.engine._call("nrl_refit_start")
    pair.engine.refit(pair.weights())
    assert len(abandoned) == 1
    assert pair.max_difference() < 1e-4


class OwnParameters(torch.nn.Module):
    """A model with parameters in its outermost module, as `image_newline` in vision models."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (torch.nn.Parameter(torch.full((4,), value)) for value in (1.0, 2.0))

    def load_weights(self, weights: Iterable[NamedTensor]) -> set[str]:
        names = set()
        for name, tensor in weights:
            parameter = self.get_parameter(name)
            parameter.weight_loader(parameter, tensor)
            names.add(name)
        return names


def test_incomplete_outermost_module_keeps_its_weights(pair_of: Callable[[str], Pair]) -> None:
    config, model = pair_of("LlamaForCausalLM").engine.config, OwnParameters()
    record_metadata_for_reloading(model)
    reload = WeightReload(model, config)
    reload.load([("first", torch.zeros(4))])
    assert reload.lacking() == {"second": "second (not sent)"}
    assert reload.finish().parameters == ("first (its module lacks another tensor)", "second")
    assert [parameter.tolist() for parameter in model.parameters()] == [[1.0] * 4, [2.0] * 4]


def test_refit_with_invalid_values_or_dtype_raises(pair_of: Callable[[str], Pair]) -> None:
    pair = pair_of("LlamaForCausalLM")
    name = "model.layers.1.mlp.down_proj.weight"
    for change, message in (
        (lambda tensor: tensor.index_fill(0, torch.tensor([3]), float("nan")), "NaN and 0 infinite values"),
        (lambda tensor: (tensor * 100).to(torch.int32), f"{name} was sent as int32, and the engine holds float32"),
        (lambda tensor: tensor.to(torch.float8_e4m3fn), f"{name} was sent as float8_e4m3fn"),
    ):
        with pytest.raises(EngineError, match=message):
            pair.engine.refit((key, change(tensor) if key == name else tensor) for key, tensor in pair.weights())
        pair.engine.refit(pair.weights())
        assert pair.max_difference() < 1e-4


def test_cache_is_finite_after_overflow(pair_of: Callable[[str], Pair]) -> None:
    """The weights are finite, but their outputs are not."""
    pair = pair_of("LlamaForCausalLM")
    name = "model.layers.0.self_attn.v_proj.weight"
    pair.engine.refit((key, torch.full_like(t, 3e38) if key == name else t) for key, t in pair.weights())
    assert not torch.tensor(pair.engine.score(PROMPTS, Sampling())[0][1:]).isfinite().all()
    pair.engine.refit(pair.weights())
    samples = pair.engine.generate([row[:5] for row in PROMPTS] * 8, Sampling(), max_new_tokens=20)
    assert all(torch.tensor(sample.logprobs).isfinite().all() for sample in samples)


class Interruption(BaseException):
    """An exception like those raised by a timeout or Ctrl-C."""


@pytest.mark.parametrize("error", [Interruption, RuntimeError])
@pytest.mark.parametrize(
    ("method", "step"),
    [
        *product(("execute_model", "sample_tokens", "update_from_output"), (1, 3)),
        *product(
            ("add_request", "condense", "refresh_metadata"), (1, 3)
        ),  # methods of vLLM's batch, which is then partially changed
        ("remove_request", 2),
        ("_enqueue_waiting_request", 2),  # a method of the scheduler, which then lists the request
    ],
)
def test_call_after_exception(
    pair_of: Callable[[str], Pair], monkeypatch: pytest.MonkeyPatch, method: str, step: int, error: type[BaseException]
) -> None:
    pair = pair_of("LlamaForCausalLM")
    core = pair.engine.llm.llm_engine.engine_core.engine_core
    runner = core.model_executor.driver_worker.worker.model_runner
    owner = next(each for each in (runner, runner.input_batch, core.scheduler) if hasattr(each, method))
    original, calls = getattr(owner, method), []

    def fails(*args: Any, **kwargs: Any) -> Any:
        calls.append(method)
        if len(calls) != step:
            return original(*args, **kwargs)
        if method == "_enqueue_waiting_request":
            original(*args, **kwargs)
        raise error("planted")

    expected = pair.engine.generate(PROMPTS, Sampling(0.0), max_new_tokens=8)
    monkeypatch.setattr(owner, method, fails)
    with pytest.raises(Interruption if error is Interruption else EngineError):
        pair.engine.generate([[7, 8, 9]] * 3, Sampling(), max_new_tokens=8)
    monkeypatch.undo()
    assert pair.engine.generate(PROMPTS, Sampling(0.0), max_new_tokens=8) == expected
    assert pair.max_difference() < 1e-4


def test_call_after_interrupt_at_any_time(pair_of: Callable[[str], Pair]) -> None:
    pair = pair_of("LlamaForCausalLM")
    expected = pair.engine.generate(PROMPTS, Sampling(0.0), max_new_tokens=8)

    def interrupt(*_: object) -> None:
        raise Interruption

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for after in (0.003, 0.01, 0.02, 0.04, 0.08, 0.15):
            signal.setitimer(signal.ITIMER_REAL, after)
            with pytest.raises(Interruption):
                pair.engine.generate(PROMPTS * 4, Sampling(), max_new_tokens=200)
            assert pair.engine.generate(PROMPTS, Sampling(0.0), max_new_tokens=8) == expected
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_calls_from_several_threads_are_serialized(pair_of: Callable[[str], Pair]) -> None:
    """Generations wait for a refit in another thread, and for each other.

    Under pytest-xdist, torch uses one core. OpenMP applies such a setting only to the thread that makes it.
    """
    pair = pair_of("LlamaForCausalLM")
    engine, results = pair.engine, []
    rows = [[[*row[number:], 7] for row in PROMPTS] for number in range(4)]
    expected = [engine.generate(each, Sampling(0.0), max_new_tokens=24) for each in rows]
    started = threading.Event()

    def tensors() -> Iterator[NamedTensor]:
        started.set()
        time.sleep(0.3)
        yield from pair.weights()

    def generate(number: int) -> None:
        started.wait()
        results.append((number, engine.generate(rows[number], Sampling(0.0), max_new_tokens=24)))

    threads = [threading.Thread(target=generate, args=(number,)) for number in range(len(rows))]
    for thread in threads:
        thread.start()
    engine.refit(tensors())
    for thread in threads:
        thread.join()
    assert sorted(results) == list(enumerate(expected))


def test_unsupported_sampling_raises(pair_of: Callable[[str], Pair]) -> None:
    engine = pair_of("LlamaForCausalLM").engine
    for temperature in (0.005, 2.5):
        with pytest.raises(
            EngineError, match=r"temperature=\S+: vllm samples at 0 \(greedy\) and at temperatures from 0.01 to 2"
        ):
            engine.generate(PROMPTS, Sampling(temperature), max_new_tokens=1)
    with pytest.raises(EngineError, match="max_new_tokens=0: expected a whole number of at least 1"):
        engine.generate(PROMPTS, Sampling(), max_new_tokens=0)
    assert len(engine.generate(PROMPTS, Sampling(2.0), max_new_tokens=1)) == 2


def test_tokenizer_eos_token_stops_completion(vllm: OneEngine, tmp_path: Path) -> None:
    """Its end token is missing in the configurations. Tokens past it are sampled only with `ignore_end`."""
    pair = Pair("LlamaForCausalLM", vllm, tmp_path)
    trainer = HFEngine(pair.model, "trainer")
    (unstopped,) = trainer.generate(PROMPTS[:1], Sampling(0.0), max_new_tokens=8)
    end = unstopped.tokens[3]
    vocabulary = {f"t{token}": token for token in range(pair.model.config.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=f"t{end}").save_pretrained(tmp_path)
    engine = pair.engine
    (stopped,) = engine.generate(PROMPTS[:1], Sampling(0.0), max_new_tokens=8, ignore_end=False)
    assert stopped.tokens == unstopped.tokens[: unstopped.tokens.index(end) + 1]
    assert stopped.finish_reason == "stop"
    assert engine.generate(PROMPTS[:1], Sampling(0.0), max_new_tokens=8)[0].tokens == unstopped.tokens


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Gemma3ForCausalLM"])
@pytest.mark.parametrize("first", [True, False])
def test_refit_of_tied_head_must_equal_embeddings(
    architecture: str, first: bool, vllm: OneEngine, tmp_path: Path
) -> None:
    pair = Pair(architecture, vllm, tmp_path, tie_word_embeddings=True)
    embeddings = dict(pair.weights())["model.embed_tokens.weight"]

    def with_head(head: torch.Tensor) -> Iterator[NamedTensor]:
        yield from [("lm_head.weight", head)] if first else []
        yield from pair.weights()
        yield from [] if first else [("lm_head.weight", head)]

    with pytest.raises(EngineError, match=r"lm_head.weight differs from model.embed_tokens.weight.*ties them"):
        pair.engine.refit(with_head(embeddings * 2))
    pair.engine.refit(with_head(embeddings.clone()))
    assert pair.max_difference() < 1e-4
