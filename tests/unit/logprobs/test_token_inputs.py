"""Arguments of `token_logprobs`: rows that begin with padding, boundaries of documents, and invalid values."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call
from transformers import LlamaConfig, PreTrainedModel

from nrl_models import AutoModelForCausalLM, registry
from nrl_models.errors import DeviceError, HeadError, SamplingError, UnknownArgumentError
from nrl_models.logprobs import Sampling, rollout_logprobs, token_logprobs
from nrl_models.testing.case import FamilyCase, randomize
from nrl_models.testing.tiny import tiny_config

WIDE = torch.float64


def new_model(architecture: str, dtype: torch.dtype = WIDE, **tiny: Any) -> PreTrainedModel:
    return FamilyCase(registry.model_class(architecture), tiny=tiny).model(dtype)


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(LlamaConfig), dtype=torch.float32).eval()
    randomize(model)
    return model


IDS = torch.randint(16, 480, (2, 9), generator=torch.Generator().manual_seed(0))

LEFT_PADDED: dict[str, dict[str, Any]] = {
    "BartForCausalLM": {},  # learned positions that count columns
    "Llama4ForCausalLM": {"attention_chunk_size": 4},  # chunks that count columns
    "RecurrentGemmaForCausalLM": {},  # padding enters the state
    "RobertaForCausalLM": {},  # positions that count other tokens than the padding token
    "WhisperForCausalLM": {},
    "ZambaForCausalLM": {"mamba_proj_bias": True},
    "LlamaForCausalLM": {},
}
"""Models whose transformers class computes different logits with left padding, and one (Llama) that does not."""


@pytest.mark.long
@pytest.mark.parametrize("architecture", LEFT_PADDED)
@pytest.mark.parametrize("terms", ["token", "sequence", "numbers"])
def test_left_padding_does_not_change_values(architecture: str, terms: str) -> None:
    model = new_model(architecture, **LEFT_PADDED[architecture])
    rows = [IDS[0], IDS[1, :5], IDS[1, 2:8]]
    starts = (2, 6, 3)
    ids, mask = torch.full((3, 12), 3), torch.zeros(3, 12, dtype=torch.long)
    for number, (row, start) in enumerate(zip(rows, starts, strict=True)):
        ids[number, start : start + len(row)], mask[number, start : start + len(row)] = row, 1
    weights = torch.randn(3, 12, generator=torch.Generator().manual_seed(1), dtype=WIDE)
    alone = [token_logprobs(model, row[None], entropy=True) for row in rows]
    expected = torch.zeros(3, 12, dtype=WIDE)
    entropy = torch.zeros(3, 12, dtype=WIDE)
    for number, (result, start) in enumerate(zip(alone, starts, strict=True)):
        place = slice(start, start + result.logprobs.shape[1])
        expected[number, place], entropy[number, place] = result.logprobs[0], result.entropy[0]
    wanted = torch.autograd.grad((expected * weights).sum(), model.get_output_embeddings().weight)[0]
    loss_terms = torch.arange(36).view(3, 12) % 4 if terms == "numbers" else terms
    result = token_logprobs(
        model,
        ids,
        attention_mask=mask,
        entropy=True,
        loss=lambda result: (result.logprobs * weights).sum(),
        loss_terms=loss_terms,
    )
    assert torch.equal(result.mask, mask.bool() & torch.nn.functional.pad(mask[:, :-1], (1, 0)).bool())
    torch.testing.assert_close(result.logprobs, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(result.entropy, entropy, rtol=0, atol=1e-6)
    actual = torch.autograd.grad(result.loss, model.get_output_embeddings().weight)[0]
    assert (actual - wanted).abs().max() < 1e-6 * wanted.abs().max()


def test_padding_after_packed_documents_with_any_position() -> None:
    """RoBERTa's decoder computes positions of documents itself, from the padding token on."""
    model = new_model("RobertaForCausalLM")
    row = torch.cat([IDS[0], IDS[1, :5], torch.full((3,), 3)])[None]
    position_ids = torch.cat([torch.arange(9), torch.arange(5), torch.zeros(3, dtype=torch.long)])[None]
    mask = (torch.arange(17) < 14)[None]
    result = token_logprobs(model, row, attention_mask=mask, position_ids=position_ids).logprobs[0]
    alone = [token_logprobs(model, part[None]).logprobs[0] for part in (IDS[0], IDS[1, :5])]
    torch.testing.assert_close(result[:14], torch.cat(alone), rtol=0, atol=1e-6)


def test_cu_seqlens_separate_sequences(llama: PreTrainedModel) -> None:
    """The first token of a document has no log-probability, whether positions or boundaries separate documents."""
    boundaries = torch.tensor([0, 4, 9], dtype=torch.int32)
    arguments = {"cu_seq_lens_q": boundaries, "cu_seq_lens_k": boundaries, "max_length_q": 5, "max_length_k": 5}
    position_ids = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    expected = token_logprobs(llama, IDS[:1], position_ids=position_ids)
    for more in ({}, {"position_ids": position_ids}):
        result = token_logprobs(llama, IDS[:1], **arguments, **more)
        assert torch.equal(result.mask, expected.mask)
        assert torch.equal(result.logprobs, expected.logprobs)
    padded = torch.cat([IDS.new_zeros(1, 2), IDS[:1]], 1)
    mask = (torch.arange(11) >= 2)[None]
    boundaries = torch.tensor([0, 2, 6, 11], dtype=torch.int32)
    result = token_logprobs(
        llama, padded, attention_mask=mask, **arguments | {"cu_seq_lens_q": boundaries, "cu_seq_lens_k": boundaries}
    )
    torch.testing.assert_close(result.logprobs[:, 2:], expected.logprobs)
    with pytest.raises(ValueError, match="cu_seq_lens_q and position_ids disagree at token 4"):
        token_logprobs(llama, IDS[:1], position_ids=torch.arange(9)[None], **arguments)


def cu_seqlens(*lengths: int) -> dict[str, Any]:
    starts = torch.tensor([0, *lengths]).cumsum(0).int()
    return {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts} | dict.fromkeys(
        ("max_length_q", "max_length_k"), max(lengths)
    )


@pytest.mark.parametrize("architecture", ["Qwen2_5_VLForConditionalGeneration", "RobertaForCausalLM"])
def test_single_document_keeps_model_positions(architecture: str) -> None:
    """Positions of M-RoPE come from images, and those of RoBERTa from token IDs."""
    case = FamilyCase(registry.model_class(architecture))
    inputs, model = case.inputs(images="VL" in architecture, batch=1), case.model()
    ids = inputs.pop("input_ids")
    inputs.pop("attention_mask", None)
    logprobs = case.reference()(input_ids=ids, use_cache=False, **inputs).logits.log_softmax(-1)
    expected = logprobs[:, :-1].gather(2, ids[:, 1:, None].clamp_max(logprobs.shape[-1] - 1))[..., 0]
    scored = ids < logprobs.shape[-1] - 16  # placeholders of images have IDs after the vocabulary
    for more in (cu_seqlens(ids.shape[1]), {"position_ids": torch.arange(ids.shape[1])[None]}):
        result = token_logprobs(model, ids, score=scored, **inputs, **more).logprobs
        torch.testing.assert_close(result[:, 1:], expected * scored[:, 1:], rtol=0, atol=1e-5)


@pytest.mark.parametrize("order", ["image text", "text image", "image text image"])
def test_packed_images_keep_mrope_positions(order: str) -> None:
    case = FamilyCase(registry.model_class("Qwen2_5_VLForConditionalGeneration"))
    inputs, model = case.inputs(images=True, batch=1), case.model()
    types = inputs.pop("mm_token_type_ids")
    documents = {"image": inputs.pop("input_ids"), "text": IDS[:1]}
    kinds = order.split()
    alone = {
        kind: token_logprobs(model, ids, score=ids < 400, **(inputs if kind == "image" else {})).logprobs
        for kind, ids in documents.items()
    }
    packed = torch.cat([documents[kind] for kind in kinds], 1)
    media = {name: torch.cat([value] * kinds.count("image")) for name, value in inputs.items()}
    all_types = torch.cat([types if kind == "image" else torch.zeros_like(IDS[:1]) for kind in kinds], 1)
    lengths = [documents[kind].shape[1] for kind in kinds]
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    expected = torch.cat([alone[kind] for kind in kinds], 1)
    for more in (cu_seqlens(*lengths), {"position_ids": positions, "mm_token_type_ids": all_types}):
        result = token_logprobs(model, packed, score=packed < 400, **media, **more).logprobs
        torch.testing.assert_close(result, expected, rtol=0, atol=1e-5)


def test_videos_require_token_types() -> None:
    """Without types, all images of a batch with a video would have positions of text."""
    case = FamilyCase(registry.model_class("Qwen2_5_VLForConditionalGeneration"))
    inputs, model = case.inputs(images=True, batch=1), case.model()
    ids, types = inputs["input_ids"], inputs["mm_token_type_ids"]
    video = ids.masked_fill(ids == case.config.image_token_id, case.config.video_token_id)
    both = torch.cat([ids, video])
    media = {"pixel_values": inputs["pixel_values"], "image_grid_thw": inputs["image_grid_thw"]}
    videos = {"pixel_values_videos": inputs["pixel_values"], "video_grid_thw": inputs["image_grid_thw"]}
    image = token_logprobs(model, ids, score=ids < 400, **media).logprobs
    all_types = torch.cat([types, 2 * types])
    result = token_logprobs(model, both, score=both < 400, mm_token_type_ids=all_types, **media, **videos).logprobs
    torch.testing.assert_close(result[:1], image, rtol=0, atol=1e-5)
    for row, arguments in ((both, media | videos), (video, videos)):
        with pytest.raises(ValueError, match="mm_token_type_ids is missing"):
            token_logprobs(model, row, score=row < 400, **arguments)


def test_packed_images_with_row_positions_raise() -> None:
    case = FamilyCase(registry.model_class("Qwen2_5OmniThinkerForConditionalGeneration"))
    inputs, model = case.inputs(images=True, batch=1), case.model()
    ids = torch.cat([inputs.pop("input_ids"), IDS[:1]], 1)
    positions = torch.cat([torch.arange(ids.shape[1] - 9), torch.arange(9)])[None]
    with pytest.raises(ValueError, match="position_ids start again inside a row with images"):
        token_logprobs(model, ids, position_ids=positions, **inputs)


@pytest.mark.parametrize(
    ("value", "shown"), [(2, "2"), (-1, "-1"), (0.5, "0.5"), (math.nan, "nan"), (-math.inf, "-inf"), (-1e9, "-1e\\+09")]
)
@pytest.mark.parametrize("name", ["attention_mask", "score"])
def test_non_binary_mask_raises(llama: PreTrainedModel, name: str, value: float, shown: str) -> None:
    """Rejects additive masks, in which 0 marks a token. In a binary mask, 0 marks padding."""
    mask = torch.ones(2, 9, dtype=torch.tensor(value).dtype)
    mask[1, 3] = value
    with pytest.raises(ValueError, match=f"{name} has the value {shown}: expected 1 or True for tokens"):
        token_logprobs(llama, IDS, **{name: mask})


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.float32, torch.bfloat16])
def test_mask_dtypes(llama: PreTrainedModel, dtype: torch.dtype) -> None:
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, :3] = mask[1, 7:] = 0
    expected = token_logprobs(llama, IDS, attention_mask=mask, score=mask)
    result = token_logprobs(llama, IDS, attention_mask=mask.to(dtype), score=mask.to(dtype))
    assert torch.equal(result.logprobs, expected.logprobs)
    assert torch.equal(result.mask, expected.mask)


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.uint8])
def test_token_id_dtypes(llama: PreTrainedModel, dtype: torch.dtype) -> None:
    ids = IDS.clamp(max=250)
    assert torch.equal(token_logprobs(llama, ids.to(dtype)).logprobs, token_logprobs(llama, ids).logprobs)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_ids": IDS + 512}, "token ID .*, and LlamaForCausalLM has embeddings for 0 to 511. Fill padding"),
        ({"input_ids": IDS.masked_fill(IDS[1, 8] == IDS, -100)}, "token ID -100, and LlamaForCausalLM"),
        ({"input_ids": IDS.float()}, "input_ids is of torch.float32: expected whole numbers"),
        ({"input_ids": IDS > 99}, "input_ids is of torch.bool: expected whole numbers"),
        ({"input_ids": IDS[:, :0]}, r"input_ids has shape \(2, 0\): expected at least one token"),
        ({"input_ids": IDS[:0]}, r"input_ids has shape \(0, 9\): expected at least one token"),
        ({"position_ids": torch.zeros(2, 9)}, "position_ids is of torch.float32: expected whole numbers"),
    ],
)
def test_invalid_values_raise(llama: PreTrainedModel, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        token_logprobs(llama, **{"input_ids": IDS} | arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_ids": IDS.tolist()}, "input_ids=.*: expected a tensor"),
        ({"attention_mask": [[1] * 9] * 2}, "attention_mask=.*: expected a tensor"),
        ({"attention_masks": torch.ones(2, 9)}, r"attention_masks \(did you mean attention_mask\?\)"),
        ({"temperatures": 0.7}, r"temperatures \(did you mean temperature\?\)"),
        ({"topk": 5}, r"topk \(did you mean top_k\?\)"),
        ({"loss": "grpo"}, "loss='grpo': expected a function"),
    ],
)
def test_invalid_arguments_raise(llama: PreTrainedModel, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(UnknownArgumentError, match=message):
        token_logprobs(llama, **{"input_ids": IDS} | arguments)


@pytest.mark.parametrize("model", [None, "a model", torch.nn.Linear(2, 2)])
def test_objects_without_output_embedding_raise(llama: PreTrainedModel, model: Any) -> None:
    with pytest.raises(HeadError, match="has no output embedding"):
        token_logprobs(model, IDS)
    if model is not None:
        with pytest.raises(HeadError, match="has no output embedding"):
            token_logprobs(llama, IDS, reference=model)


def test_full_logits_without_output_embedding(llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = token_logprobs(llama, IDS).logprobs
    monkeypatch.setattr(type(llama), "get_output_embeddings", lambda self: None)
    assert torch.allclose(token_logprobs(llama, IDS, chunk_size=None).logprobs, expected, atol=1e-5)
    with pytest.raises(HeadError, match="If it has logits, pass chunk_size=None"):
        token_logprobs(llama, IDS)
    with pytest.raises(HeadError, match="LlamaModel returns no logits"):
        token_logprobs(llama.model, IDS, chunk_size=None)


@pytest.mark.parametrize(
    "arguments",
    [{"temperature": True}, {"temperature": 1e-40}, {"top_k": True}, {"top_p": True}, {"temperature": "0.7"}],
)
def test_invalid_sampling_parameter_types_raise(llama: PreTrainedModel, arguments: dict[str, Any]) -> None:
    (name,) = arguments
    with pytest.raises(SamplingError, match=f"{name}=.*: expected a"):
        token_logprobs(llama, IDS, **arguments)


def test_head_with_other_dtype_than_model() -> None:
    """BEAM's logits are in fp32, also of a model in fp64."""
    model = new_model("BeamForCausalLM")
    model.set_experts_implementation("eager")
    with torch.no_grad():
        logits = model(input_ids=IDS, use_cache=False).logits
    assert logits.dtype == torch.float32
    expected = logits[:, :-1].log_softmax(-1).gather(-1, IDS[:, 1:, None])[..., 0]
    result = token_logprobs(model, IDS).logprobs[:, 1:]
    torch.testing.assert_close(result, expected.double(), rtol=0, atol=1e-5)


UNREADABLE: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "sparse": (torch.Tensor.to_sparse, r"has the layout sparse_coo: pass tensor\.to_dense\(\)"),
    "compressed": (torch.Tensor.to_sparse_csr, r"has the layout sparse_csr: pass tensor\.to_dense\(\)"),
    "nested": (lambda tensor: torch.nested.nested_tensor(list(tensor)), r"is nested: pad it with torch\.nested"),
    "jagged": (lambda tensor: torch.nested.nested_tensor(list(tensor), layout=torch.jagged), "is nested: pad it"),
    "meta": (lambda tensor: tensor.to("meta"), "is on meta and has no values"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("kind", UNREADABLE)
@pytest.mark.parametrize("name", ["input_ids", "attention_mask", "position_ids", "score"])
def test_tensors_without_readable_numbers_raise(llama: PreTrainedModel, kind: str, name: str) -> None:
    convert, message = UNREADABLE[kind]
    value = torch.arange(9).expand(2, 9) if name == "position_ids" else torch.ones_like(IDS)
    with pytest.raises(UnknownArgumentError, match=f"^{name} {message}"):
        token_logprobs(llama, **{"input_ids": IDS, name: convert(value)})


def test_weights_on_meta_raise(llama: PreTrainedModel) -> None:
    on_meta = copy.deepcopy(llama).to("meta")
    for options in ({}, {"chunk_size": None}):
        with pytest.raises(DeviceError, match=r"LlamaForCausalLM has \d+ weights on meta, which have no values"):
            token_logprobs(on_meta, IDS, **options)
    with pytest.raises(DeviceError, match="weights on meta"):
        token_logprobs(llama, IDS, reference=on_meta)
    with pytest.raises(DeviceError, match="weights on meta"):
        rollout_logprobs(on_meta, [[20, 21, 22]])
    partly = copy.deepcopy(llama)
    partly.model.layers[1].to("meta")
    with pytest.raises(DeviceError, match=r"has 9 weights on meta, .*: model\.layers\.1\.self_attn\.q_proj\.weight"):
        token_logprobs(partly, IDS)


class Scores(nn.Module):
    def __init__(self, model: nn.Module, chunk_size: str | None) -> None:
        super().__init__()
        self.model, self.chunk_size = model, chunk_size

    def forward(self) -> torch.Tensor:
        return token_logprobs(self.model, IDS, chunk_size=self.chunk_size).logprobs


def test_function_transforms_need_full_logits(llama: PreTrainedModel) -> None:
    model = copy.deepcopy(llama)
    model.set_attn_implementation("eager")  # has forward-mode derivatives
    chunked, full = Scores(model, "auto"), Scores(model, None)
    parameters = {name: parameter.detach() for name, parameter in full.named_parameters()}
    stacked = {name: torch.stack([parameter, 2 * parameter]) for name, parameter in parameters.items()}
    transforms: dict[str, Callable[[Any], Any]] = {
        "grad": lambda run: torch.func.grad(lambda values: run(values).sum())(parameters),
        "vmap": lambda run: torch.func.vmap(run)(stacked),
        "jvp": lambda run: torch.func.jvp(run, (parameters,), (parameters,))[1],
        "dual": lambda run: dual(run, parameters),
    }
    for name, transform in transforms.items():
        with pytest.raises(
            UnknownArgumentError, match=r"chunk_size.*: transforms of torch\.func .* with chunk_size=None"
        ):
            transform(lambda values: functional_call(chunked, values, ()))
        result = transform(lambda values: functional_call(full, values, ()))
        if name == "grad":
            chunked().sum().backward()
            weight = chunked.model.get_parameter("lm_head.weight")
            torch.testing.assert_close(result["model.lm_head.weight"], weight.grad, rtol=1e-4, atol=1e-5)
        if name == "vmap":
            torch.testing.assert_close(result[0], chunked().detach(), rtol=1e-5, atol=1e-5)
    with pytest.raises(UnknownArgumentError, match=r"^input_ids is batched by torch\.vmap"):
        torch.func.vmap(lambda ids: token_logprobs(model, ids[None]).logprobs)(IDS)


def dual(run: Callable[[Any], torch.Tensor], parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the forward-mode derivative of a function in the direction of the parameters."""
    with forward_ad.dual_level():
        values = {name: forward_ad.make_dual(parameter, parameter) for name, parameter in parameters.items()}
        return forward_ad.unpack_dual(run(values)).tangent


@pytest.mark.parametrize(
    ("keyword", "value", "message"),
    [
        ("sampling", Sampling(temperature=0.5), "sampling: pass its temperature, top_k and top_p"),
        ("mask", torch.ones_like(IDS), "mask: pass padding as attention_mask"),
        ("warmth", 0.5, "unknown argument warmth: no module of LlamaForCausalLM reads it"),
        ("prompt", "text", "unknown argument prompt: no module of LlamaForCausalLM reads it"),
    ],
)
def test_keyword_that_no_module_reads_raises(keyword: str, value: Any, message: str, llama: PreTrainedModel) -> None:
    """`**kwargs` of transformers' models ignore it."""
    with pytest.raises(UnknownArgumentError, match=message):
        token_logprobs(llama, IDS, **{keyword: value})


@pytest.mark.parametrize("keyword", ["return_dict", "output_hidden_states", "output_attentions", "is_causal"])
def test_keyword_that_transformers_reads_has_no_effect(keyword: str, llama: PreTrainedModel) -> None:
    inputs: dict[str, Any] = {keyword: True}
    assert torch.equal(token_logprobs(llama, IDS, **inputs).logprobs, token_logprobs(llama, IDS).logprobs)


@pytest.mark.parametrize(
    ("sequences", "score", "message"),
    [
        ([IDS[0].to("meta")], None, "sequence 0 is not a list of token ids: the tensor is on meta"),
        ([IDS[0].to_sparse()], None, "sequence 0 is not a list of token ids: the tensor has the layout sparse_coo"),
        ([IDS[0]], [torch.ones(9, device="meta")], "score of sequence 0 is not a list of bools: the tensor is on meta"),
    ],
)
def test_rollouts_without_readable_values_raise(
    sequences: list[torch.Tensor], score: list[torch.Tensor] | None, message: str, llama: PreTrainedModel
) -> None:
    with pytest.raises(ValueError, match=message):
        rollout_logprobs(llama, sequences, score=score)


def test_class_in_place_of_model_raises() -> None:
    for call in (lambda: token_logprobs(nn.Linear, IDS), lambda: rollout_logprobs(nn.Linear, [IDS[0]])):  # type: ignore[arg-type]
        with pytest.raises(UnknownArgumentError, match=r"the model is the class Linear"):
            call()


def test_missing_tokens_raise(llama: PreTrainedModel) -> None:
    with pytest.raises(UnknownArgumentError, match=r"input_ids=None: expected a tensor"):
        token_logprobs(llama, None)  # type: ignore[arg-type]
