"""Updates from a trainer to a receiver are exact for many architectures, and atomic if any step fails."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping, Set
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from nrl_models import registry
from nrl_models.engines.digests import tensor_digest
from nrl_models.engines.engine_types import NamedTensor
from nrl_models.engines.transfer import updates
from nrl_models.engines.transfer.receiver import Receiver
from nrl_models.engines.transfer.segments import Segment
from nrl_models.engines.transfer.sender import ABANDON, Sender
from nrl_models.engines.transfer.updates import Update, Weights
from nrl_models.errors import EngineError, MixedWeightsError
from nrl_models.testing.case import randomize
from nrl_models.testing.tiny import tiny_config

ARCHITECTURES = [
    "ApertusForCausalLM",
    "ArceeForCausalLM",
    "BambaForCausalLM",
    "BitNetForCausalLM",
    "GlmForCausalLM",
    "CohereForCausalLM",
    "DeepseekV3ForCausalLM",
    "DogeForCausalLM",
    "Ernie4_5_MoeForCausalLM",
    "FalconH1ForCausalLM",
    "Gemma2ForCausalLM",
    "Gemma3ForConditionalGeneration",
    "Gemma3nForCausalLM",
    "Glm4MoeForCausalLM",
    "GraniteForCausalLM",
    "GptOssForCausalLM",
    "GraniteMoeForCausalLM",
    "LlamaForCausalLM",
    "Llama4ForCausalLM",
    "MiniMaxForCausalLM",
    "MixtralForCausalLM",
    "NemotronHForCausalLM",
    "Olmo2ForCausalLM",
    "OlmoeForCausalLM",
    "Phi3ForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen2VLForConditionalGeneration",
    "Qwen3ForCausalLM",
    "Qwen3MoeForCausalLM",
    "Qwen3NextForCausalLM",
    "StableLmForCausalLM",
]

DELTAS = 34
"""Number of deltas per architecture: more than 1,000 in total."""


def model_of(architecture: str, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    model_class = registry.model_class(architecture)
    reference = model_class.reference_class()
    torch.manual_seed(0)
    config = tiny_config(reference.config_class, model_class.tiny, reference)
    model = model_class.from_config(config, dtype=dtype, device="cpu").eval()
    randomize(model)
    return model


class Workers:
    """The engine side: a `Receiver` over one of our models, which loads weights one by one as vLLM does.

    Attributes:
        steps: The requested steps, in order.
        fails: Called with each step and "before" or "after".
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.receiver = Receiver(self._apply, lambda error: setattr(self, "mixed_weights_error", error))
        self.mixed_weights_error: str | None = None
        self.is_open = False
        self.fails = lambda step, when: None
        self.steps: list[str] = []
        self.before_load = lambda name: None
        self.loaded: list[str] = []

    def _apply(self, tensors: Mapping[str, torch.Tensor], changed: Set[str]) -> None:
        state_dict, adapter = self.model.state_dict(), self.model.state_dict_adapter
        self.loaded = []
        for name in tensors:
            if name in changed:
                try:
                    self.before_load(name)
                    target = adapter.hub[name]
                except Exception as error:
                    if self.loaded:
                        raise MixedWeightsError(str(error)) from error
                    raise
                for parameter in target.parameters:
                    target.write_into(parameter, state_dict[parameter], tensors[name])
                self.loaded.append(name)

    # The interface of vLLM's workers that the client calls

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._step("init", lambda: setattr(self.receiver, "keep", init_info["deltas"]))

    def start_weight_update(self) -> None:
        def start() -> None:
            if self.is_open:
                raise RuntimeError("an update is open")
            self.receiver.start()
            self.is_open = True

        self._step("start", start)

    def update_weights(self, update_info: Any) -> None:
        def update() -> None:
            if not self.is_open:
                raise RuntimeError("no update is open")
            self.is_open = False  # as in vLLM, if the following code raises
            sent = json.loads(json.dumps(update_info))
            if sent == ABANDON:
                self.receiver.start()
            else:
                self.receiver.stage(Update.of_json(sent))
            self.is_open = True

        self._step("update", update)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        def finish() -> None:
            self.receiver.finish()
            self.is_open = False

        self._step("finish", finish)

    def _step(self, name: str, do: Any) -> None:
        self.steps.append(name)
        self.fails(name, "before")
        do()
        self.fails(name, "after")


def exported(model: PreTrainedModel) -> Iterator[NamedTensor]:
    return model.state_dict_adapter.iter_export(model)


def state(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def different_tensors(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> list[str]:
    """Return the names of tensors that are not bit-identical."""
    assert one.keys() == other.keys()

    def bits(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.contiguous().reshape(-1).view(torch.uint8)

    return [name for name in one if not torch.equal(bits(one[name]), bits(other[name]))]


@torch.no_grad()
def train(model: PreTrainedModel, share: float, generator: torch.Generator, only: str = "") -> None:
    """Change random bits in a fraction of the elements of each parameter and buffer."""
    for name, tensor in model.state_dict().items():
        if only in name and tensor.is_floating_point() and tensor.is_contiguous():
            flat = tensor.view(-1).view(torch.uint8).view(tensor.numel(), -1)
            changed = (torch.rand(len(flat), generator=generator) < share).nonzero().flatten()
            flat[changed] ^= torch.randint(0, 256, (len(changed), flat.shape[1]), generator=generator).to(torch.uint8)


def served(trainer: PreTrainedModel, **options: Any) -> tuple[Workers, Sender]:
    """Return an engine with other weights than the trainer's, and its sender."""
    engine = copy.deepcopy(trainer)
    train(engine, 0.5, torch.Generator().manual_seed(9))
    workers = Workers(engine)
    return workers, Sender(workers, **options)


def nbytes(update: Update) -> int:
    return sum(segment.nbytes for segment in update.segments)


QUICK = ("BitNetForCausalLM", "DeepseekV3ForCausalLM", "Qwen3MoeForCausalLM")


@pytest.mark.parametrize(
    "architecture", [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in ARCHITECTURES]
)
def test_deltas_match_dense_updates(architecture: str) -> None:
    assert len(ARCHITECTURES) >= 30
    trainer = model_of(architecture, torch.float32 if len(architecture) % 2 else torch.bfloat16)
    workers, sender = served(trainer)
    dense, digests = sender.send(exported(trainer))
    assert not dense.base
    assert not different_tensors(workers.model.state_dict(), trainer.state_dict())
    generator = torch.Generator().manual_seed(len(architecture))
    layers = [name for name in trainer.state_dict() if ".0." in name]
    for number in range(DELTAS):
        share = [0.0, 1e-4, 0.01, 0.05, 1.0][number % 5]
        train(trainer, share, generator, only=layers[number % len(layers)] if number % 3 == 2 else "")
        before = digests
        update, digests = sender.send(exported(trainer))
        assert digests == {name: tensor_digest(tensor) for name, tensor in exported(trainer)}
        assert update.base == str(number + 1)
        assert nbytes(update) <= nbytes(dense) + 200 * len(digests)  # headers
        assert set(workers.loaded) <= {name for name in digests if digests[name] != before[name]}
        assert not different_tensors(workers.model.state_dict(), trainer.state_dict())
        assert workers.receiver.weights is not None
        assert workers.receiver.weights.version == update.version == str(number + 2)


def test_delta_size_of_one_percent_changes(llama: PreTrainedModel) -> None:
    trainer = copy.deepcopy(llama)
    workers, sender = served(trainer)
    dense, _ = sender.send(exported(trainer))
    train(trainer, 0.01, torch.Generator().manual_seed(0))
    update, _ = sender.send(exported(trainer))
    assert nbytes(update) <= 0.05 * nbytes(dense)
    assert not different_tensors(workers.model.state_dict(), trainer.state_dict())


def test_small_buckets(llama: PreTrainedModel) -> None:
    trainer = copy.deepcopy(llama)
    workers, sender = served(trainer, bucket_bytes=2**12)
    for _ in range(3):
        train(trainer, 0.2, torch.Generator().manual_seed(0))
        sender.send(exported(trainer))
        assert not different_tensors(workers.model.state_dict(), trainer.state_dict())


@pytest.mark.parametrize("shared", [True, False], ids=["halves of one buffer", "two buffers"])
def test_memory_reused_after_each_bucket(llama: PreTrainedModel, shared: bool) -> None:
    trainer = copy.deepcopy(llama)
    size = trainer.model.layers[0].mlp.up_proj.weight.nbytes
    workers, sender = served(trainer, bucket_bytes=size)

    def from_two_buffers() -> Iterator[NamedTensor]:
        halves = torch.empty(2, size // 2, dtype=torch.bfloat16)
        buffers = halves if shared else [half.clone() for half in halves]
        tensors = [(name, tensor) for name, tensor in exported(trainer) if tensor.nbytes == size]
        assert len(tensors) > 3
        for number, (name, tensor) in enumerate(tensors):
            yield name, buffers[number % 2].view(tensor.shape).copy_(tensor)

    for share in (1.0, 1.0, 0.01):
        train(trainer, share, torch.Generator().manual_seed(0))
        sender.send(from_two_buffers())
        received = {name: tensor for name, tensor in workers.model.state_dict().items() if tensor.nbytes == size}
        assert not different_tensors(received, {name: trainer.state_dict()[name] for name in received})


def test_receiver_keeps_no_tensors_without_deltas(llama: PreTrainedModel) -> None:
    trainer = copy.deepcopy(llama)
    workers, sender = served(trainer, deltas=False)
    for _ in range(2):
        train(trainer, 0.01, torch.Generator().manual_seed(0))
        assert not sender.send(exported(trainer))[0].base
        assert not different_tensors(workers.model.state_dict(), trainer.state_dict())
    assert workers.receiver.weights is not None
    assert not workers.receiver.weights.tensors


STEPS = [
    (step, when, nth)
    for step in ("init", "start", "update", "finish")
    for when in ("before", "after")
    for nth in ((1,) if step == "init" else (1, 2, 3))  # `init` is sent once
]


@pytest.mark.long
@pytest.mark.parametrize(("step", "when", "nth"), STEPS)
def test_trainer_crash_leaves_consistent_version(llama: PreTrainedModel, step: str, when: str, nth: int) -> None:
    """The trainer exits in its first (dense) update or in a later one. Another trainer continues."""
    trainer = copy.deepcopy(llama)
    workers, sender = served(trainer)
    generator = torch.Generator().manual_seed(0)
    for _ in range(nth - 1):
        sender.send(exported(trainer))
        train(trainer, 0.01, generator)
    before = state(workers.model)

    def die(*now: str) -> None:
        if now == (step, when):
            workers.fails = dead
            raise KeyboardInterrupt

    def dead(*now: str) -> None:
        raise ConnectionError

    workers.fails = die
    with pytest.raises(KeyboardInterrupt):
        sender.send(exported(trainer))
    workers.fails = lambda step, when: None
    took_effect = (step, when) == ("finish", "after")
    assert not different_tensors(state(workers.model), trainer.state_dict() if took_effect else before)
    assert workers.mixed_weights_error is None
    train(trainer, 0.01, generator)
    other = Sender(workers)
    assert not other.send(exported(trainer))[0].base
    assert not different_tensors(workers.model.state_dict(), trainer.state_dict())
    train(trainer, 0.01, generator)
    assert not sender.send(exported(trainer))[0].base  # the first one after a failure is also dense
    assert not different_tensors(workers.model.state_dict(), trainer.state_dict())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.pop("model.norm.weight"), "model.norm.weight is missing"),
        (lambda weights: weights.update({"model.nrom.weight": torch.ones(3)}), "model.nrom.weight is not one of them"),
        (
            lambda weights: weights.update({"model.norm.weight": weights["model.norm.weight"][:-1]}),
            r"model.norm.weight is bfloat16 \(255,\), and was bfloat16 \(256,\)",
        ),
        (
            lambda weights: weights.update({"model.norm.weight": weights["model.norm.weight"].float()}),
            r"model.norm.weight is float32 \(256,\), and was bfloat16",
        ),
    ],
)
def test_changed_set_of_tensors_raises_and_keeps_version(llama: PreTrainedModel, change: Any, message: str) -> None:
    trainer = copy.deepcopy(llama)
    workers, sender = served(trainer)
    sender.send(exported(trainer))
    before = state(workers.model)
    train(trainer, 0.01, torch.Generator().manual_seed(0))
    weights = dict(exported(trainer))
    change(weights)
    with pytest.raises(EngineError, match=message):
        Sender(workers).send(weights.items())
    assert not different_tensors(workers.model.state_dict(), before)
    with pytest.raises(EngineError, match=r"of the version sent before"):  # the sender detects it without the worker
        sender.send(weights.items())
    assert workers.mixed_weights_error is None
    sender.send(exported(trainer))
    assert not different_tensors(workers.model.state_dict(), trainer.state_dict())


def test_partially_applied_update_raises_until_dense_update(llama: PreTrainedModel) -> None:
    trainer = copy.deepcopy(llama)
    workers, sender = served(trainer)
    sender.send(exported(trainer))
    train(trainer, 0.01, torch.Generator().manual_seed(0))

    def fail_at_sixth(name: str) -> None:
        if len(workers.loaded) == 5:
            raise RuntimeError("the fifth")

    workers.before_load = fail_at_sixth
    message = r"parts of version '1' of the weights and parts of version '2': the fifth\. It raises on every call until"
    with pytest.raises(MixedWeightsError, match=message):
        sender.send(exported(trainer))
    assert sender.in_doubt
    assert workers.mixed_weights_error is not None
    workers.before_load = lambda name: None
    assert not sender.send(exported(trainer))[0].base
    assert not sender.in_doubt
    assert workers.mixed_weights_error is None
    assert not different_tensors(workers.model.state_dict(), trainer.state_dict())


def test_delta_repairs_mixed_weights(
    llama: PreTrainedModel,
) -> None:
    trainer = copy.deepcopy(llama)
    workers, sender = served(trainer)
    _, before = sender.send(exported(trainer))
    first, previous_sender = copy.deepcopy(trainer), copy.copy(sender)
    train(trainer, 0.01, torch.Generator().manual_seed(0))

    def fail_at_sixth(name: str) -> None:
        if len(workers.loaded) == 5:
            raise RuntimeError("the fifth")

    workers.before_load = fail_at_sixth
    with pytest.raises(MixedWeightsError):
        sender.send(exported(trainer))
    written = set(workers.loaded)
    workers.before_load = lambda name: None
    train(first, 0.01, torch.Generator().manual_seed(1), only="layers.1.mlp")
    update, digests = previous_sender.send(exported(first))
    assert update.base == "1"
    assert all(digests[name] == before[name] for name in written)
    assert workers.mixed_weights_error is None
    assert not different_tensors(workers.model.state_dict(), first.state_dict())


def test_delta_against_another_version_raises(llama: PreTrainedModel) -> None:
    trainer = copy.deepcopy(llama)
    workers, sender = served(trainer)
    sender.send(exported(trainer))
    other = copy.deepcopy(trainer)
    train(other, 0.01, torch.Generator().manual_seed(5))
    Sender(workers).send(exported(other), "1")  # another model under the same version name
    train(trainer, 0.01, torch.Generator().manual_seed(0))
    with pytest.raises(
        EngineError, match=r"made against version '1', digest .*, and the engine has version '1', digest"
    ):
        sender.send(exported(trainer))
    assert not different_tensors(workers.model.state_dict(), other.state_dict())
    sender.send(exported(trainer))
    assert not different_tensors(workers.model.state_dict(), trainer.state_dict())


def test_damaged_update_raises(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flipped bit in the engine's copy, in the decoded delta, or in the data it reads."""
    trainer = copy.deepcopy(llama)
    workers, sender = served(trainer)
    sender.send(exported(trainer))
    before = state(workers.model)
    train(trainer, 0.01, torch.Generator().manual_seed(0))
    original, stage, read = updates.patched, workers.receiver.stage, Segment.read

    def with_flipped_bit(tensor: torch.Tensor) -> torch.Tensor:
        damaged = tensor.clone()
        damaged.view(-1).view(torch.uint8)[0] ^= 1
        return damaged

    def stage_with_damaged_delta(update: Update) -> None:
        with monkeypatch.context() as context:
            context.setattr(updates, "patched", lambda *args: ((n, with_flipped_bit(t)) for n, t in original(*args)))
            stage(update)

    workers.receiver.stage = stage_with_damaged_delta
    with pytest.raises(EngineError, match="version '2' arrived damaged"):
        sender.send(exported(trainer))
    assert not different_tensors(workers.model.state_dict(), before)

    def read_damaged(segment: Segment) -> Any:
        tensors, text = read(segment)
        return {name: with_flipped_bit(tensor) for name, tensor in tensors.items()}, text

    def stage_with_damaged_segment(update: Update) -> None:
        with monkeypatch.context() as context:
            context.setattr(Segment, "read", read_damaged)
            stage(update)

    workers.receiver.stage = stage_with_damaged_segment
    with pytest.raises(EngineError, match="version '3' arrived damaged"):
        sender.send(exported(trainer))
    assert not different_tensors(workers.model.state_dict(), before)
    workers.receiver.stage = stage
    sender.send(exported(trainer))
    name, tensor = next(iter(workers.receiver.weights.tensors.items()))
    workers.receiver.weights = Weights.of("4", {**workers.receiver.weights.tensors, name: with_flipped_bit(tensor)})
    with pytest.raises(EngineError, match="made against version '4', digest"):
        sender.send(exported(trainer))


WITHOUT_BASE_DIGEST = {"version": "1", "digest": "d", "base": "0", "base_digest": "", "segments": []}


@pytest.mark.parametrize("value", [{}, {"version": "1"}, {"abandon": False}, {"version": 3}, WITHOUT_BASE_DIGEST])
def test_invalid_update_raises(value: dict[str, Any]) -> None:
    with pytest.raises(EngineError, match="is not an update of weights: expected version"):
        Update.of_json(value)
