"""Operations after the output embedding are detected. Operations that cannot be detected raise an error."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import PreTrainedModel

from nrl_models import registry
from nrl_models.errors import HeadError
from nrl_models.logprobs import rollout_logprobs
from nrl_models.logprobs.head import hidden_states_and_head
from nrl_models.logprobs.tokens import token_logprobs
from nrl_models.testing.case import FamilyCase, randomize
from nrl_models.testing.tiny import tiny_config


def new_model(name: str, dtype: torch.dtype = torch.float32, **config: Any) -> PreTrainedModel:
    torch.manual_seed(0)
    model_class = getattr(transformers, name)
    model = model_class._from_config(tiny_config(model_class.config_class, config), dtype=dtype).eval()
    randomize(model)
    return model


@pytest.mark.parametrize(
    ("name", "config", "scale", "cap"),
    [
        ("LlamaForCausalLM", {}, 1.0, None),
        ("CohereForCausalLM", {"logit_scale": 0.1}, 0.1, None),
        ("GraniteForCausalLM", {"logits_scaling": 7.0}, 1 / 7, None),
        ("Gemma2ForCausalLM", {"final_logit_softcapping": 12.0}, 1.0, 12.0),
        ("GPT2LMHeadModel", {}, 1.0, None),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_scale_and_cap_are_detected(
    name: str, config: dict[str, Any], scale: float, cap: float | None, dtype: torch.dtype, input_ids: torch.Tensor
) -> None:
    model = new_model(name, dtype, **config)
    with torch.no_grad():
        hidden, head = hidden_states_and_head(model, input_ids)
        expected = model(input_ids=input_ids, use_cache=False).logits
    assert head.scale == pytest.approx(scale, rel=1e-6)
    assert head.cap == cap
    assert torch.equal(head(hidden), expected) or dtype == torch.float32
    torch.testing.assert_close(head(hidden), expected, rtol=0, atol=1e-5 if dtype == torch.float32 else 0.02)


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "GraniteForCausalLM", "Gemma2ForCausalLM"])
def test_default_dtype_does_not_change_results(
    name: str, low_default_dtype: Callable[[], None], input_ids: torch.Tensor
) -> None:
    config = {"final_logit_softcapping": 7.3} if name.startswith("Gemma") else {}
    model = new_model(name, **config)
    with torch.no_grad():
        expected = token_logprobs(model, input_ids).logprobs
        low_default_dtype()
        assert torch.equal(token_logprobs(model, input_ids).logprobs, expected)


@pytest.mark.parametrize("cap", [0.1, 0.01, 1e-3, 1e-4, 1e-6])
def test_small_caps_give_values_of_full_logits(cap: float, input_ids: torch.Tensor) -> None:
    """Caps below the numbers that measure the head."""
    model = new_model("Gemma2ForCausalLM", final_logit_softcapping=cap)
    weight = model.get_output_embeddings().weight
    results = [token_logprobs(model, input_ids, chunk_size=size).logprobs for size in ("auto", None)]
    torch.testing.assert_close(*results, rtol=0, atol=2e-6)
    actual, expected = (torch.autograd.grad(result.sum(), weight)[0] for result in results)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())


def test_cap_of_zero_raises(input_ids: torch.Tensor) -> None:
    model = new_model("Gemma2ForCausalLM", final_logit_softcapping=0.0)
    with pytest.raises(HeadError, match=r"changes finite logits to NaN: 0 -> nan\. Correct the scale or soft cap"):
        token_logprobs(model, input_ids)


def test_changed_cap_is_detected(input_ids: torch.Tensor) -> None:
    # No property that depends on the configuration is cached.
    model = new_model("Gemma2ForCausalLM")
    assert hidden_states_and_head(model, input_ids)[1].cap == model.config.final_logit_softcapping
    model.config.final_logit_softcapping = None
    assert hidden_states_and_head(model, input_ids)[1].cap is None


def test_model_is_unchanged(input_ids: torch.Tensor) -> None:
    model = new_model("Gemma2ForCausalLM").train()
    before = model(input_ids=input_ids, token_type_ids=None).logits
    token_logprobs(model, input_ids)
    assert model.training
    assert "forward" not in model.lm_head.__dict__
    assert not model.lm_head._forward_pre_hooks
    assert torch.equal(model(input_ids=input_ids).logits, before)


def test_modules_keep_training_mode(input_ids: torch.Tensor) -> None:
    """A frozen part stays in evaluation mode while the model is in training mode."""
    model = new_model("LlamaForCausalLM").train()
    model.model.layers[0].eval()
    modes = {name: module.training for name, module in model.named_modules()}
    token_logprobs(model, input_ids)
    assert {name: module.training for name, module in model.named_modules()} == modes


def test_hooks_on_output_embedding_run(input_ids: torch.Tensor) -> None:
    model, seen = new_model("LlamaForCausalLM"), []
    model.lm_head.register_forward_hook(lambda *_: seen.append(1))
    hidden_states_and_head(model, input_ids)
    assert seen


def squared(logits: torch.Tensor) -> torch.Tensor:
    return logits * logits.abs()


def shifted(logits: torch.Tensor) -> torch.Tensor:
    return logits + 1.0


def clamped(logits: torch.Tensor) -> torch.Tensor:
    return logits.clamp(-30, 30)


def scaled_by_position(logits: torch.Tensor) -> torch.Tensor:
    return logits / torch.arange(1, logits.shape[1] + 1)[:, None]


def without_last_token(logits: torch.Tensor) -> torch.Tensor:
    return logits[..., :-1]


def one_token_masked(logits: torch.Tensor) -> torch.Tensor:
    logits[..., 300] = -100.0
    return logits


def first_token_scaled(logits: torch.Tensor) -> torch.Tensor:
    # The placeholder logits start with zero, which hides it. The comparison with the model's own logits finds it.
    return torch.cat([logits[..., :1] * 3, logits[..., 1:]], -1)


@pytest.mark.parametrize(
    "transform",
    [squared, shifted, clamped, scaled_by_position, without_last_token, one_token_masked, first_token_scaled],
    ids=lambda transform: transform.__name__,
)
def test_unsupported_logit_transform_requires_full_logits(
    transform: Callable[[torch.Tensor], torch.Tensor], input_ids: torch.Tensor
) -> None:
    class Odd(transformers.LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            output.logits = transform(output.logits)
            return output

    model = Odd._from_config(tiny_config(transformers.LlamaConfig)).eval()
    with pytest.raises(HeadError, match="chunk_size=None"):
        token_logprobs(model, input_ids)
    with torch.no_grad():
        result = token_logprobs(model, input_ids, chunk_size=None)
        expected = model(input_ids=input_ids).logits.log_softmax(-1)[:, :-1].gather(-1, input_ids[:, 1:, None])
    torch.testing.assert_close(result.logprobs[:, 1:], expected[..., 0])


def test_bypassed_output_embedding_raises(input_ids: torch.Tensor) -> None:
    class Bypassing(transformers.LlamaForCausalLM):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = self.model(*args, **kwargs)
            logits = nn.functional.linear(output.last_hidden_state, self.lm_head.weight)
            return transformers.modeling_outputs.CausalLMOutput(logits=logits)

    model = Bypassing._from_config(tiny_config(transformers.LlamaConfig)).eval()
    with pytest.raises(HeadError, match="0 times"):
        token_logprobs(model, input_ids)


class AutocastInside(transformers.LlamaForCausalLM):
    """Computes in bf16 and returns fp32, as a model that accelerate prepares with mixed precision."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            output = super().forward(*args, **kwargs)
        output.logits = output.logits.float()
        return output


class NoAutocastAtHead(transformers.LlamaForCausalLM):
    """Computes its logits in fp32, also under autocast."""

    def forward(self, input_ids: torch.Tensor, use_cache: bool = False) -> Any:
        hidden = self.model(input_ids, use_cache=use_cache).last_hidden_state
        with torch.autocast("cpu", enabled=False):
            logits = self.lm_head(hidden.float())
        return transformers.modeling_outputs.CausalLMOutput(logits=logits)


@pytest.mark.parametrize("lora", [False, True])
@pytest.mark.parametrize("model_class", [AutocastInside, NoAutocastAtHead])
@pytest.mark.parametrize("outer_autocast", [False, True])
def test_head_uses_autocast_of_model(
    model_class: type[Any], lora: bool, outer_autocast: bool, input_ids: torch.Tensor
) -> None:
    torch.manual_seed(0)
    model = model_class._from_config(tiny_config(transformers.LlamaConfig), dtype=torch.float32).eval()
    randomize(model)
    reference = copy.deepcopy(model)
    randomize(reference)
    if lora:
        model = get_peft_model(model, LoraConfig(target_modules=["lm_head"], init_lora_weights=False)).eval()
    results = []
    for chunk_size in (4, None):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=outer_autocast):
            result = token_logprobs(model, input_ids, reference=reference, chunk_size=chunk_size)
            loss = -result.logprobs.sum()
        loss.backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        results.append((result.logprobs, result.kl, gradients))
    torch.testing.assert_close(results[0][:2], results[1][:2], rtol=0, atol=2e-5)
    for gradient, expected in zip(results[0][2], results[1][2], strict=True):
        assert (gradient - expected).norm() <= 1e-2 * expected.norm() + 1e-6


@pytest.mark.parametrize("chunk_size", ["auto", None])
def test_logits_for_image_columns_raise(chunk_size: str | None) -> None:
    """GIT computes logits for its image, which has no placeholders in the token ids."""
    case = FamilyCase(registry.model_class("GitForCausalLM"))
    inputs = case.inputs(images=True, batch=1)
    with pytest.raises(HeadError, match="expected one column for each token"):
        token_logprobs(case.model(), **inputs, chunk_size=chunk_size)


@pytest.mark.parametrize("name", ["Blip2ForConditionalGeneration", "Kosmos2ForConditionalGeneration"])
def test_forward_that_requires_images(name: str) -> None:
    case = FamilyCase(registry.model_class(name))
    inputs = case.inputs(images=True, batch=1)
    inputs["score"] = inputs["input_ids"] < 400
    result = token_logprobs(case.model(), **inputs).logprobs
    torch.testing.assert_close(result, token_logprobs(case.model(), **inputs, chunk_size=None).logprobs)


def test_model_without_output_embedding_raises(input_ids: torch.Tensor) -> None:
    with pytest.raises(HeadError, match="no output embedding"):
        token_logprobs(new_model("LlamaModel"), input_ids)


def test_model_errors_are_propagated() -> None:
    model = new_model("GPT2LMHeadModel")
    too_long = torch.full((1, model.config.max_position_embeddings + 1), 16)
    with pytest.raises(IndexError, match="index out of range in self"):
        token_logprobs(model, too_long)


TINY: dict[str, Any] = {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SEQ2SEQ: dict[str, Any] = {"vocab_size": 128, "d_model": 64, "max_position_embeddings": 64, "decoder_start_token_id": 0}
SEQ2SEQ |= {f"{part}_{key}": 1 for part in ("encoder", "decoder") for key in ("layers", "attention_heads")}
NOT_CAUSAL = {
    "has an encoder": ("BartForConditionalGeneration", transformers.BartConfig(**SEQ2SEQ)),
    "masked language model": ("BertForMaskedLM", transformers.BertConfig(**TINY, intermediate_size=64)),
    "is_decoder=false": (
        "RobertaForCausalLM",
        transformers.RobertaConfig(**TINY, intermediate_size=64, pad_token_id=1),
    ),
    "use_bidirectional_attention=True": (
        "GemmaForCausalLM",
        transformers.GemmaConfig(
            **TINY, intermediate_size=64, head_dim=16, num_key_value_heads=4, use_bidirectional_attention=True
        ),
    ),
    "use_bidirectional_attention='all'": (
        "Gemma4ForCausalLM",
        transformers.Gemma4TextConfig(
            **TINY,
            intermediate_size=64,
            head_dim=16,
            num_key_value_heads=4,
            vocab_size_per_layer_input=128,
            use_bidirectional_attention="all",
        ),
    ),
    "causal=false": ("XLMWithLMHeadModel", transformers.XLMConfig(vocab_size=128, emb_dim=64, n_layers=1, n_heads=4)),
}


@pytest.mark.parametrize("chunk_size", [4, None])
@pytest.mark.parametrize("reason", NOT_CAUSAL)
def test_non_causal_models_raise(reason: str, chunk_size: int | None, input_ids: torch.Tensor) -> None:
    architecture, config = NOT_CAUSAL[reason]
    model = getattr(transformers, architecture)(config).eval()
    with torch.no_grad():  # the logits of the first token depend on the last one
        rows = input_ids[:1].repeat(2, 1).clamp(max=127)
        rows[1, -1] -= 1
        logits = model(input_ids=rows).logits
    assert not torch.allclose(logits[0, 0], logits[1, 0])
    for call in (
        lambda: token_logprobs(model, input_ids, chunk_size=chunk_size),
        lambda: rollout_logprobs(model, input_ids.tolist(), chunk_size=chunk_size),
    ):
        with pytest.raises(HeadError, match=reason) as raised:
            call()
        assert "chunk_size" not in str(raised.value)


def test_bidirectional_prefix_requires_token_type_ids(input_ids: torch.Tensor) -> None:
    model = FamilyCase(registry.model_class("PaliGemmaForConditionalGeneration")).new_pair()[1].eval()
    rows = input_ids[:1].clamp(max=100)
    types = torch.ones_like(rows)
    types[:, :2] = 0
    with torch.no_grad():
        logits = model(input_ids=rows, token_type_ids=types).logits[0]
    expected = logits[:-1].log_softmax(-1).gather(1, rows[0, 1:, None])[:, 0]
    scored = rollout_logprobs(model, rows.tolist(), model_inputs=[{"token_type_ids": types}])
    torch.testing.assert_close(scored.logprobs[0, 1:], expected, rtol=1e-5, atol=1e-5)
    scored = token_logprobs(model, rows, token_type_ids=types)
    torch.testing.assert_close(scored.logprobs[0, 1:], expected, rtol=1e-5, atol=1e-5)
    for call in (lambda: token_logprobs(model, rows), lambda: rollout_logprobs(model, rows.tolist())):
        with pytest.raises(HeadError, match="attends in both directions without token_type_ids"):
            call()


def test_families_declared_non_causal_raise(input_ids: torch.Tensor) -> None:
    model = FamilyCase(registry.model_class("CpmAntForCausalLM")).new_pair()[1].eval()
    rows = input_ids[:1].repeat(2, 1).clamp(min=1, max=127)
    rows[1, -1] -= 1
    with torch.no_grad():
        logits = model(input_ids=rows).logits
    assert not torch.allclose(logits[0, 0], logits[1, 0])
    for chunk_size in (4, None):
        with pytest.raises(HeadError, match="CpmAntForCausalLM attends in both directions"):
            token_logprobs(model, input_ids, chunk_size=chunk_size)
        with pytest.raises(HeadError, match="CpmAntForCausalLM attends in both directions"):
            rollout_logprobs(model, input_ids.tolist(), chunk_size=chunk_size)


@pytest.mark.parametrize("chunk_size", [4, None])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["CpmAntForCausalLM", "XLNetLMHeadModel"])
def test_class_without_family_that_reads_later_tokens_raises(
    name: str, compiled: bool, chunk_size: int | None, input_ids: torch.Tensor
) -> None:
    """No configuration key says so: it is measured, for each model once."""
    model = new_model(name)
    wrapped = torch.compile(model, backend="eager") if compiled else model
    trained = new_model("LlamaForCausalLM", vocab_size=model.config.vocab_size)
    rows, calls = input_ids.clamp(max=99), []
    for call in (
        lambda: token_logprobs(wrapped, rows, chunk_size=chunk_size),
        lambda: rollout_logprobs(wrapped, rows.tolist(), chunk_size=chunk_size),
        lambda: token_logprobs(trained, rows, reference=wrapped, chunk_size=chunk_size),
    ):
        with pytest.raises(HeadError, match=f"{name} attends in both directions: its logits of a token depend on"):
            call()
        model.register_forward_pre_hook(lambda *_: calls.append(1))
    assert not calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_causality_is_measured_once(dtype: torch.dtype, input_ids: torch.Tensor) -> None:
    model, batches = new_model("LlamaForCausalLM", dtype).train(), []
    model.register_forward_pre_hook(
        lambda _, __, inputs: batches.append(tuple(inputs["input_ids"].shape)), with_kwargs=True
    )
    for _ in range(2):
        token_logprobs(model, input_ids, chunk_size=None)
    assert batches == [(2, 4), tuple(input_ids.shape), tuple(input_ids.shape)]
    assert model.training


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        ("BartForCausalLM", transformers.BartConfig(**SEQ2SEQ)),
        (
            "RobertaForCausalLM",
            transformers.RobertaConfig(**TINY, intermediate_size=64, pad_token_id=1, is_decoder=True),
        ),
        (
            "GPTNeoXForCausalLM",
            transformers.GPTNeoXConfig(**TINY, intermediate_size=64),
        ),  # its is_decoder=False has no effect
    ],
)
def test_causal_decoder_variants(architecture: str, config: Any, input_ids: torch.Tensor) -> None:
    model = getattr(transformers, architecture)(config).eval()
    ids = input_ids.clamp(max=127)
    with torch.no_grad():
        result = token_logprobs(model, ids)
        expected = model(input_ids=ids).logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None])[..., 0]
    torch.testing.assert_close(result.logprobs[:, 1:], expected)


@pytest.mark.parametrize("entropy", [False, True])
def test_head_quantized_in_place_gives_the_models_logprobs(entropy: bool, input_ids: torch.Tensor) -> None:
    torchao = pytest.importorskip("torchao.quantization")
    model = new_model("LlamaForCausalLM")
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig(), filter_fn=lambda _, name: name == "lm_head")
    expected = token_logprobs(model, input_ids, chunk_size=None, entropy=entropy)
    found = token_logprobs(model, input_ids, chunk_size=4, entropy=entropy)
    torch.testing.assert_close(found.logprobs, expected.logprobs, rtol=0, atol=1e-5)
    if entropy:
        torch.testing.assert_close(found.entropy, expected.entropy, rtol=0, atol=1e-5)
