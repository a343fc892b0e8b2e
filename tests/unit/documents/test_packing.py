"""Packed documents in one row, with positions and masks in several combinations."""

from __future__ import annotations

import copy
import inspect
import pickle
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaForCausalLM, LlamaModel, PreTrainedModel

from nrl_models import AutoModel, AutoModelForCausalLM, AutoModelForSequenceClassification, registry
from nrl_models.common.documents.packing import keep_documents_apart
from nrl_models.common.upstream import cache_input
from nrl_models.testing.case import FamilyCase

PACKED = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 3, 4]])


class Spy(torch.nn.Module):
    """A model that records the mask it receives."""

    @keep_documents_apart
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: object = None,
        cache: object = None,
        use_cache: bool | None = None,
    ) -> torch.Tensor | None:
        return attention_mask


@pytest.fixture
def model(llama: PreTrainedModel) -> PreTrainedModel:
    built = AutoModelForCausalLM.from_config(llama.config).eval()
    built.load_state_dict(llama.state_dict())
    return built


def test_transformers_mixes_documents_with_mask_or_cache(llama: PreTrainedModel) -> None:
    # This bug is why `keep_documents_apart` exists. Once this check fails, the function can be removed.
    input_ids = torch.arange(16, 28)[None]
    with torch.no_grad():
        apart = llama(input_ids, position_ids=PACKED, use_cache=False).logits
        masked = llama(input_ids, attention_mask=torch.ones_like(PACKED), position_ids=PACKED, use_cache=False).logits
        cached = llama(input_ids, position_ids=PACKED).logits
    assert not torch.allclose(apart, masked, atol=1e-3)
    assert not torch.allclose(apart, cached, atol=1e-3)


def test_mask_and_cache_keep_documents_apart(model: PreTrainedModel) -> None:
    input_ids = torch.arange(16, 28)[None]
    with torch.no_grad():
        apart = model(input_ids, position_ids=PACKED, use_cache=False).logits
        assert torch.equal(model(input_ids, position_ids=PACKED).logits, apart)
        assert torch.equal(model(input_ids, torch.ones_like(PACKED), PACKED).logits, apart)
        assert torch.equal(model(input_ids, position_ids=PACKED, attention_mask=torch.ones_like(PACKED)).logits, apart)


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_copied_model_keeps_documents_apart(model: PreTrainedModel, copied) -> None:
    input_ids = torch.arange(16, 28)[None]
    with torch.no_grad():
        apart = model(input_ids, position_ids=PACKED).logits
        masked = copied(model)(input_ids, position_ids=PACKED, attention_mask=torch.ones_like(PACKED)).logits
    assert torch.equal(masked, apart)


LENGTHS = [4, 3, 5]
INNER = ["LlamaForCausalLM", "Qwen3_5ForCausalLM", "OPTForCausalLM"]
"""transformers packs these incorrectly: with a mask of ones, in layers with a state, and always (in this order)."""


def in_documents(run: Callable[..., Any], input_ids: torch.Tensor) -> torch.Tensor:
    """Return the output of `run` for each document separately."""
    return torch.cat([run(input_ids=document)[0] for document in input_ids.split(LENGTHS, 1)], 1)


def case_of(architecture: str) -> tuple[PreTrainedModel, torch.Tensor]:
    """Return a tiny model that may be changed, and tokens for `PACKED`."""
    case = FamilyCase(registry.model_class(architecture))
    return copy.deepcopy(case.model()), case.inputs(images=False, length=12)["input_ids"][:1]


@pytest.mark.parametrize("architecture", ["Llama", "Qwen3", "Mistral", "Gemma3", "Mixtral"])
@torch.no_grad()
def test_logits_of_packed_documents_are_those_of_each_document(architecture: str) -> None:
    """docs/training.md: bit-equal in dense models without sliding windows, otherwise up to rounding."""
    model: Any = FamilyCase(registry.model_class(f"{architecture}ForCausalLM"), torch.device("cpu")).model()
    lengths = [19, 12, 5]  # also longer than the tiny windows
    input_ids = torch.randint(20, 60, (1, sum(lengths)), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    packed = model(input_ids=input_ids, position_ids=positions, use_cache=False).logits
    documents = input_ids.split(lengths, 1)
    expected = torch.cat([model(input_ids=document, use_cache=False).logits for document in documents], 1)
    is_exact = architecture in ("Llama", "Qwen3")
    torch.testing.assert_close(packed, expected, rtol=0, atol=0 if is_exact else 1e-5)


@pytest.mark.long
@pytest.mark.parametrize("architecture", ["Gemma3ForConditionalGeneration", "Gemma4ForConditionalGeneration"])
@pytest.mark.parametrize("image_first", [True, False], ids=["image first", "text first"])
@torch.no_grad()
def test_images_attend_to_themselves_in_packed_rows(architecture: str, image_first: bool) -> None:
    """In transformers, sliding layers read the mask of images at positions, which restart with each document."""
    case = FamilyCase(registry.model_class(architecture))
    model = copy.deepcopy(case.model())
    if architecture.startswith("Gemma4"):  # as in its larger published models
        model.config.get_text_config().use_bidirectional_attention = "vision"
    inputs = case.inputs(images=True, batch=1)
    ids, types = inputs["input_ids"], next(name for name in inputs if "token_type" in name)
    inputs = {name: value for name, value in inputs.items() if name == types or "pixel" in name or "image" in name}
    text = torch.randint(20, 60, (1, 9), generator=torch.Generator().manual_seed(0))
    of_types = {types: torch.cat([inputs[types], torch.zeros_like(text)], 1)}
    parts, sizes = [ids, text], [ids.shape[1], text.shape[1]]
    expected = [model(input_ids=ids, **inputs).logits, model(input_ids=text).logits]
    if not image_first:
        of_types = {types: torch.cat([torch.zeros_like(text), inputs[types]], 1)}
        parts, sizes, expected = parts[::-1], sizes[::-1], expected[::-1]
    positions = torch.cat([torch.arange(size) for size in sizes])[None]
    found = model(input_ids=torch.cat(parts, 1), position_ids=positions, **inputs | of_types).logits
    torch.testing.assert_close(found, torch.cat(expected, 1), rtol=0, atol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("architecture", INNER)
@pytest.mark.parametrize("changed", ["nothing", "copied", "pickled", "forward replaced", "base forward replaced"])
@pytest.mark.parametrize("mask", [None, torch.ones_like(PACKED)], ids=["no mask", "mask"])
@torch.no_grad()
def test_base_model_keeps_documents_apart(architecture: str, changed: str, mask: torch.Tensor | None) -> None:
    model, input_ids = case_of(architecture)
    if changed == "copied":
        model = copy.deepcopy(model)
    elif changed == "pickled":
        model = pickle.loads(pickle.dumps(model))
    elif changed == "forward replaced":
        model.forward = types.MethodType(type(model).reference_class().forward, model)
    elif changed == "base forward replaced":
        base_class = next(
            base for base in type(model.base_model).__mro__ if base.__module__.startswith("transformers.")
        )
        model.base_model.forward = types.MethodType(base_class.wraps.forward, model.base_model)
    packed = {"input_ids": input_ids, "position_ids": PACKED, "attention_mask": mask}
    for run in (model, model.base_model, model.model):
        torch.testing.assert_close(run(**packed)[0], in_documents(run, input_ids), rtol=1e-4, atol=1e-4)


def test_base_model_without_support_raises(model: PreTrainedModel) -> None:
    class Limited(type(model)):  # type: ignore[misc]
        limits = {"packed sequences": "its attention looks everywhere"}

    limited = Limited(model.config)
    with pytest.raises(ValueError, match=r"LlamaModel cannot keep documents apart .* looks everywhere"):
        limited.model(input_ids=torch.arange(12)[None], position_ids=PACKED)
    limited.model(input_ids=torch.arange(12)[None])


def test_base_model_class_matches_transformers(model: PreTrainedModel, llama: PreTrainedModel) -> None:
    inner = model.model
    assert isinstance(inner, LlamaModel)
    assert repr(inner) == repr(llama.model)
    assert str(type(inner)) == str(LlamaModel)
    assert inspect.signature(inner.forward) == inspect.signature(llama.model.forward)


def test_replaced_base_model_forward_keeps_documents_apart() -> None:
    model = registry.model_class("Qwen3_5ForCausalLM")
    case = FamilyCase(model)
    base = AutoModel.from_config(case.config).eval()
    base.forward = types.MethodType(type(base).reference_class().forward, base)
    input_ids = case.inputs(images=False, length=12)["input_ids"][:1]
    with torch.no_grad():
        hidden = base(input_ids=input_ids, position_ids=PACKED)[0]
        torch.testing.assert_close(hidden, in_documents(base, input_ids), rtol=1e-4, atol=1e-4)


def test_class_patches_take_effect_and_are_reversible(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Liger patches transformers' classes, before or after our classes are created."""

    def patched(self: Any, input_ids: Any = None, position_ids: Any = None, **kwargs: Any) -> Any:
        return self.model(input_ids, position_ids=position_ids, **kwargs)

    input_ids = torch.arange(16, 28)[None]
    with torch.no_grad():
        logits = model(input_ids=input_ids, position_ids=PACKED)[0]
        with monkeypatch.context() as patch:
            patch.setattr(LlamaForCausalLM, "forward", patched)
            hidden = model(input_ids=input_ids, position_ids=PACKED, attention_mask=torch.ones_like(PACKED))[0]
            torch.testing.assert_close(hidden, in_documents(model.model, input_ids), rtol=1e-4, atol=1e-4)
        assert torch.equal(model(input_ids=input_ids, position_ids=PACKED)[0], logits)


@pytest.mark.long
@pytest.mark.parametrize(
    ("architecture", "compiled"),
    [("Qwen3_5ForCausalLM", "wrapped"), ("Lfm2ForCausalLM", "in place"), ("Lfm2ForCausalLM", "base model")],
)
def test_compiled_hybrid_keeps_documents_apart(architecture: str, compiled: str) -> None:
    """Layers with a state run each document separately, and layers with attention run the row."""
    model, input_ids = case_of(architecture)
    packed = {"input_ids": input_ids, "position_ids": PACKED, "attention_mask": torch.ones_like(PACKED)}
    torch.compiler.reset()
    with torch.no_grad():
        expected = in_documents(lambda **inputs: [model(**inputs).logits], input_ids)
        run: Any = model
        if compiled == "wrapped":
            run = torch.compile(model, backend="eager")
        elif compiled == "in place":
            model.compile(backend="eager")
        else:
            model.model = torch.compile(model.model, backend="eager")
        for _ in range(2):
            torch.testing.assert_close(run(**packed).logits, expected, rtol=1e-4, atol=1e-4)
        first = input_ids[:, : LENGTHS[0]]
        torch.testing.assert_close(run(input_ids=first).logits, expected[:, : LENGTHS[0]], rtol=1e-4, atol=1e-4)
    torch.compiler.reset()


@pytest.mark.long
def test_compiled_model_keeps_documents_apart() -> None:
    model, input_ids = case_of("LlamaForCausalLM")
    expected = in_documents(lambda **inputs: [model(**inputs).logits], input_ids)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager")
    unpacked = {"input_ids": input_ids, "position_ids": torch.arange(12)[None]}
    packed = {"input_ids": input_ids, "position_ids": PACKED, "attention_mask": torch.ones_like(PACKED)}
    with torch.no_grad():
        torch.testing.assert_close(compiled(**packed).logits, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(compiled(**unpacked).logits, model(**unpacked).logits, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(compiled(**packed).logits, expected, rtol=1e-4, atol=1e-4)
    torch.compiler.reset()
    with pytest.raises(Exception, match="Leave out fullgraph=True"):
        torch.compile(model, backend="eager", fullgraph=True)(input_ids=input_ids, position_ids=PACKED)
    torch.compiler.reset()


@pytest.mark.long
def test_forward_signature_matches_transformers() -> None:
    ours = AutoModelForCausalLM.from_config(LlamaForCausalLM.config_class(num_hidden_layers=0), device="meta")
    assert inspect.signature(ours.forward) == inspect.signature(LlamaForCausalLM(ours.config).forward)


@pytest.mark.parametrize(
    ("mask", "positions"),
    [
        ([[1, 1, 1, 1, 1]], [[0, 1, 2, 3, 4]]),
        ([[0, 0, 1, 1, 1]], [[0, 0, 0, 1, 2]]),  # padded on the left, as `generate` does
        ([[0, 0, 1, 1, 1]], [[1, 1, 0, 1, 2]]),
        ([[1, 1, 1, 0, 0]], [[0, 1, 2, 2, 2]]),
        ([[1, 1, 1, 0, 0]], [[0, 1, 2, 0, 0]]),
        ([[1, 1, 1, 1, 1]], [[7, 8, 9, 10, 11]]),  # starts inside a document
        ([[1, 0, 1, 1, 1]], [[0, 0, 1, 2, 3]]),  # a hole in the mask that positions skip
        ([[1, 0, 1, 1, 1]], [[0, 1, 1, 2, 3]]),
        ([[1, 1, 0, 1, 1]], [[0, 1, 0, 2, 3]]),
        ([[1, 1, 0, 0, 1]], [[0, 1, 1, 1, 2]]),
        ([[1, 0, 1, 0, 1]], [[0, 1, 2, 3, 4]]),  # a hole in the mask that positions count
    ],
    ids=str,
)
def test_mask_of_single_document_rows_is_unchanged(mask: list, positions: list) -> None:
    attention_mask = torch.tensor(mask)
    assert Spy().forward(attention_mask=attention_mask, position_ids=torch.tensor(positions)) is attention_mask


@pytest.mark.parametrize(
    ("mask", "positions"),
    [
        ([[1, 1, 1, 1, 1]], [[0, 1, 2, 0, 1]]),
        ([[1, 1, 1, 1, 0]], [[0, 1, 0, 1, 0]]),
        ([[1, 1, 1, 1, 0]], [[0, 1, 0, 1, 2]]),  # padding may continue after the last token
        ([[0, 1, 1, 1, 1]], [[0, 0, 1, 0, 1]]),
        ([[1, 1, 0, 1, 1]], [[0, 1, 2, 0, 1]]),  # padding between documents
        ([[1, 1, 1, 1], [1, 1, 1, 1]], [[0, 1, 2, 3], [0, 1, 0, 1]]),
    ],
    ids=str,
)
def test_mask_of_packed_rows_is_removed(mask: list, positions: list) -> None:
    assert Spy().forward(attention_mask=torch.tensor(mask), position_ids=torch.tensor(positions)) is None


@pytest.mark.parametrize("positions", [[0, 1, 2, 0, 1], [0, 0, 1, 0, 1]], ids=str)
def test_hole_inside_packed_document_raises(positions: list) -> None:
    mask, positions = torch.tensor([[1, 1, 1, 1, 1], [1, 0, 1, 1, 1]]), torch.tensor([[0, 1, 2, 3, 4], positions])
    with pytest.raises(ValueError, match="token 1 of row 1 is padding"):
        Spy().forward(attention_mask=mask, position_ids=positions)


def test_sequence_classification_of_packed_row_raises(llama: PreTrainedModel) -> None:
    values = llama.config.to_dict() | {"num_labels": 1, "pad_token_id": 0}
    model = AutoModelForSequenceClassification.from_config(type(llama.config)(**values)).eval()
    ids = torch.arange(16, 28)[None]
    with pytest.raises(ValueError, match="LlamaForSequenceClassification returns one score per row"):
        model(ids, position_ids=PACKED)
    assert model(ids, position_ids=torch.arange(12)[None]).logits.shape == (1, 1)


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        ([[0, 1, 2, 5, 6]], "from 2 to 5 at token 3 of row 0"),
        ([[0, 1, 2, 0, 1], [0, 1, 0, 4, 5]], "from 0 to 4 at token 3 of row 1"),
    ],
    ids=str,
)
def test_document_not_starting_at_zero_raises(positions: list, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Spy().forward(position_ids=torch.tensor(positions))
    mask = torch.ones(len(positions), 5, dtype=torch.long)
    mask[-1, 3:] = 0  # padding may have any position
    Spy().forward(attention_mask=mask, position_ids=torch.tensor(positions))


@pytest.mark.parametrize(
    ("boundaries", "message"),
    [
        ([0, 4, 7], r"expected increasing numbers from 0 to the 12 tokens of the batch, got \[0\] to \[7\]"),
        ([1, 4, 12], r"got \[1\] to \[12\]"),
        ([0, 7, 4, 12], r"4 follows 7 \(number 2\)"),
        ([0, 4, 4, 12], r"4 follows 4 \(number 2\)"),
        ([0, 4, 8, 12], "disagree at token 7 of row 0"),
        ([0, 4, 12], "disagree at token 7 of row 0"),
    ],
    ids=str,
)
def test_invalid_cu_seqlens_raise(boundaries: list, message: str, model: PreTrainedModel) -> None:
    starts = torch.tensor(boundaries, dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        model(torch.arange(12)[None], position_ids=PACKED, cu_seq_lens_q=starts)


def test_cu_seqlens_match_position_ids(model: PreTrainedModel) -> None:
    starts, ids = torch.tensor([0, 4, 7, 12], dtype=torch.int32), torch.arange(16, 28)[None]
    boundaries_arguments = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 5, "max_length_k": 5}
    with torch.no_grad():
        apart = model(ids, position_ids=PACKED).logits
        assert torch.equal(model(ids, **boundaries_arguments).logits, apart)
        assert torch.equal(model(ids, position_ids=PACKED, **boundaries_arguments).logits, apart)


@pytest.mark.parametrize("name", ["cache", "past_key_values"])
@pytest.mark.parametrize("cached", [0, 2])
def test_mask_of_single_document_is_kept_with_cache(name: str, cached: int) -> None:
    mask, cache = torch.tensor([[1] * (cached + 4), [1] * cached + [0, 0, 1, 1]]), {name: object()}
    positions = torch.tensor([[0, 1, 2, 3], [3, 0, 0, 1]]) + cached  # padding has any positions
    assert Spy().forward(attention_mask=mask, position_ids=positions, **cache) is mask


@pytest.mark.parametrize(("cached", "masked", "compiled"), [(0, False, False), (0, True, True), (4, True, False)])
def test_packed_row_with_cache_raises(model: PreTrainedModel, cached: int, masked: bool, compiled: bool) -> None:
    ids, cache = torch.arange(16, 28)[None], DynamicCache()
    if cached:
        model(ids[:, :cached], **cache_input(model.forward, cache))
    mask = torch.ones(1, cached + 12, dtype=torch.long) if masked else None
    for called in (model, model.model):
        called = torch.compile(called, backend="eager") if compiled else called
        with pytest.raises(ValueError, match=r"position_ids start again inside a row, and a key-value cache"):
            called(ids, position_ids=PACKED, attention_mask=mask, **cache_input(model.forward, cache))
        assert cache.get_seq_length() == cached


def test_decoding_with_positions_compiles_without_graph_break(model: PreTrainedModel) -> None:
    ids, cache = torch.arange(16, 28)[None], DynamicCache()
    model(ids[:, :8], **cache_input(model.forward, cache))
    step = {"position_ids": torch.tensor([[8]]), **cache_input(model.forward, cache)}
    logits = torch.compile(model, backend="eager", fullgraph=True)(ids[:, 8:9], **step).logits
    assert torch.allclose(logits[:, 0], model(ids).logits[:, 8], atol=1e-5)


def test_4d_mask_is_unchanged() -> None:
    mask = torch.ones(1, 1, 3, 3, dtype=torch.bool)
    assert Spy().forward(attention_mask=mask, position_ids=torch.tensor([[0, 1, 0]])) is mask
    assert Spy().forward(attention_mask=None, position_ids=torch.tensor([[0, 1, 0]])) is None


def test_packing_without_support_raises(model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(model), "limits", {"packed sequences": "its attention looks everywhere"})
    ids = torch.arange(12)[None]
    for mask in (None, torch.ones_like(ids)):
        with pytest.raises(ValueError, match=r"LlamaForCausalLM cannot keep documents apart .* looks everywhere"):
            model(input_ids=ids, position_ids=PACKED, attention_mask=mask)
    model(input_ids=ids, position_ids=torch.arange(12)[None])
    left = torch.tensor([[0] * 4 + [1] * 8])
    model(input_ids=ids, attention_mask=left, position_ids=(left.cumsum(-1) - 1).clamp(min=0))
