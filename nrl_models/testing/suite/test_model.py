"""Tests of the complete model: logits, gradients, training, copies, adapters."""

from __future__ import annotations

import copy
import io
import pickle
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from nrl_models.common.forward.routing import can_replay, replay_routing
from nrl_models.common.projections import groups_of, report
from nrl_models.inputs.image_geometry import Inputs
from nrl_models.inputs.images import cast, image_token
from nrl_models.inputs.model_inputs import decoder_ids, vocabulary_size
from nrl_models.parity.noise import gradients, limit, logits_and_routing, logits_noise, logits_of
from nrl_models.testing.case import SEED, FamilyCase
from nrl_models.testing.features import applies_to, proves
from nrl_models.testing.suite.asserts import all_tensors, assert_close, assert_same_tensors, deterministic, dtypes
from nrl_models.testing.suite.conditions import (
    reads_what_it_writes,
    scores_every_token,
    takes_image_types,
    takes_text,
    ties_embeddings,
)


@pytest.mark.thorough
@proves("logits")
def test_forward_shape(family_case: FamilyCase) -> None:
    """Check that logits have one row per token (or sequence), and one column per vocabulary entry (or label).

    An image without tokens adds rows before those of the text.
    """
    inputs, config = family_case.inputs(), family_case.config
    batch, length = decoder_ids(inputs).shape
    with torch.no_grad():
        logits = family_case.model()(**inputs).logits
        if image_token(config) is None:
            logits = logits[:, -length:] if logits.ndim == 3 else logits
    name = family_case.reference_class.__name__
    columns = config.num_labels if name.endswith("Classification") else vocabulary_size(config)
    rows = (batch,) if name.endswith("SequenceClassification") else (batch, length)
    assert tuple(logits.shape) == (*rows, columns)


@proves("logits")
@dtypes
def test_logits_equivalence(family_case: FamilyCase, dtype: torch.dtype) -> None:
    """Compare logits with the reference's.

    Below fp32, they may differ by rounding. The comparison then uses the reference's choice of experts.
    """
    model, reference, inputs = family_case.model(dtype), family_case.reference(dtype), family_case.inputs()
    expected, routing = logits_and_routing(reference, inputs)
    if dtype == torch.float32:
        assert_close(logits_of(model, inputs), expected)
        return
    routing = routing if can_replay(model) else {}
    with replay_routing(model, routing) if routing else nullcontext():
        difference = (logits_of(model, inputs) - expected).abs().max().item()
    assert difference <= limit(logits_noise(reference, inputs, routing), dtype)


@pytest.mark.thorough
@proves("logits")
def test_uncombined(family_case: FamilyCase) -> None:
    """Check that `combine=False` forms no groups, and that its logits are bitwise equal to the reference's."""
    model = family_case.model_class.from_config(family_case.config, combine=False, device=family_case.device).eval()
    reference = family_case.reference()
    assert not list(groups_of(model))
    model.load_state_dict(reference.state_dict())
    with torch.no_grad(), deterministic():
        assert torch.equal(model(**family_case.inputs()).logits, reference(**family_case.inputs()).logits)


@proves("logits")
def test_from_config_is_bit_exact(family_case: FamilyCase) -> None:
    """Check that new weights are bitwise equal to those of transformers with the same seed."""
    tensors = []
    for build in (family_case.reference_class._from_config, family_case.model_class.from_config):
        torch.manual_seed(SEED)
        tensors.append(build(family_case.config))
    expected, model = tensors
    assert_same_tensors(model.state_dict(), expected.state_dict())


@pytest.mark.thorough
@proves("logits")
@applies_to(takes_text, scores_every_token, reads_what_it_writes)
def test_embeddings_in_place_of_tokens(family_case: FamilyCase) -> None:
    """Check that embeddings as inputs give the same logits as their tokens, if they do so in the reference.

    Without token types, which transformers' processors add, the model finds images and audio by their embeddings.
    """
    model, reference, inputs = family_case.model(), family_case.reference(), family_case.inputs()
    embeddings = reference.get_input_embeddings()(inputs["input_ids"]).detach()
    rest = {name: value for name, value in inputs.items() if name != "input_ids"}
    expected = logits_of(reference, inputs)
    try:  # some classes scale the embeddings in place
        actual = logits_of(reference, rest | {"inputs_embeds": embeddings.clone()})
        is_supported = torch.allclose(actual, expected, rtol=1e-4, atol=1e-4)
    except Exception:  # any error: the reference does not accept embeddings, or not with these inputs
        is_supported = False
    if not is_supported:
        pytest.skip("transformers' class returns other outputs for `inputs_embeds` than for the same `input_ids`")
    assert_close(logits_of(model, rest | {"inputs_embeds": embeddings.clone()}), expected)
    if "token-types" in getattr(type(model).forward, "handles_quirks", ()):
        untyped = {name: value for name, value in rest.items() if not name.endswith("token_type_ids")}
        assert_close(logits_of(model, untyped | {"inputs_embeds": embeddings.clone()}), expected)


@proves("logits")
@applies_to(takes_text, scores_every_token, takes_image_types)
def test_images_without_token_types(family_case: FamilyCase) -> None:
    """Check that images give the same logits without `mm_token_type_ids`, or that the model requires them."""
    inputs = family_case.inputs()
    assert "mm_token_type_ids" in inputs
    untyped = {name: value for name, value in inputs.items() if name != "mm_token_type_ids"}
    try:
        actual = logits_of(family_case.model(), untyped)
    except ValueError as error:
        assert "mm_token_type_ids" in str(error)  # noqa: PT017
        return
    assert_close(actual, logits_of(family_case.reference(), inputs))


@proves("gradients")
def test_gradient_equivalence(family_case: FamilyCase) -> None:
    """Check that the same parameters have gradients as in the reference, with equal values."""
    reference, model = family_case.new_pair()
    expected, actual = _gradients(reference, family_case), _gradients(model, family_case)
    assert_close(actual, expected)


@pytest.mark.thorough
@proves("gradients")
def test_training_loss_decreases(family_case: FamilyCase) -> None:
    """Check that a few optimizer steps lower the loss, by the same amounts as in the reference.

    Runs in fp64 if the reference supports it. In fp32, rounding may change the choice of experts or key blocks. The
    effect grows from step to step, and differs between machines.
    """
    inputs, dtype = family_case.inputs(labels=True), torch.float64
    reference, model = family_case.new_pair(dtype)
    try:
        expected = _training_losses(reference, inputs)
    except RuntimeError:  # the reference creates fp32 tensors, or uses the limits of fp32
        dtype = torch.float32
        reference, model = family_case.new_pair(dtype)
        expected = _training_losses(reference, inputs)
    actual = _training_losses(model, inputs)
    assert min(actual[1:]) < actual[0]  # a step may overshoot
    assert actual == pytest.approx(expected, rel=1e-6 if dtype == torch.float64 else 1e-3)


def _training_losses(model: PreTrainedModel, inputs: Inputs) -> list[float]:
    for part in model.modules():
        if isinstance(part, PreTrainedModel) and part._can_set_experts_implementation():
            part.set_experts_implementation("eager")  # torch's grouped matmul does not support fp64
    torch.manual_seed(SEED)  # some routers draw random numbers in training
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    losses = []
    for _ in range(3):
        loss = model(**cast(inputs, model), use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.thorough
@proves("activation checkpointing")
def test_activation_checkpointing(family_case: FamilyCase) -> None:
    """Check that recomputing activations in the backward changes no gradient."""
    _, model = family_case.new_pair()
    expected = _gradients(model, family_case)
    model.gradient_checkpointing_enable()
    assert_close(_gradients(model, family_case), expected)


def _gradients(model: nn.Module, case: FamilyCase) -> dict[str, torch.Tensor]:
    torch.manual_seed(SEED)  # some routers draw random numbers in training
    return gradients(model, case.inputs(labels=True))


@proves("tied weights")
@applies_to(ties_embeddings)
def test_tied_weights_share_storage(family_case: FamilyCase, tmp_path: Path) -> None:
    """Check that tied tensors share one storage when built, loaded and copied, and are saved once.

    Also checks that untied embeddings do not share storage.
    """
    names, ties = {}, {}
    for tie in (True, False):
        config = family_case.config
        config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = tie
        built: Any = family_case.model_class.from_config(config)
        built.save_pretrained(tmp_path / str(tie))
        names[tie], ties[tie] = len(all_tensors(tmp_path / str(tie))), len(built.all_tied_weights_keys)
        loaded: Any = family_case.model_class.from_pretrained(tmp_path / str(tie))
        for model in (built, loaded, copy.deepcopy(loaded)):
            assert model.config.tie_word_embeddings is tie
            if (output := model.get_output_embeddings()) is not None:
                assert (model.get_input_embeddings().weight.data_ptr() == output.weight.data_ptr()) is tie
    assert names[True] + ties[True] == names[False] + ties[False]


@pytest.mark.thorough
@proves("copies")
def test_copies_keep_one_storage(family_case: FamilyCase) -> None:
    """Check that models from `deepcopy`, pickle and `torch.save` are fused like the original, in separate memory.

    torch cannot pickle parametrized modules (weight norm), so such models are only deep-copied.
    """
    # Built again, because some forwards install transformers' hooks on inner outputs, which cannot be pickled.
    model = family_case.model_class.from_config(family_case.config, device=family_case.device, combine=True)
    copies = [copy.deepcopy(model)]
    if not any(is_parametrized(module) for module in model.modules()):
        saved = io.BytesIO()
        torch.save(model, saved)
        saved.seek(0)
        copies += [pickle.loads(pickle.dumps(model)), torch.load(saved, weights_only=False)]
    for copied in copies:
        assert_same_tensors(copied.state_dict(), model.state_dict())
        assert report(copied) == report(model)
        assert all(parameter.untyped_storage().nbytes() == parameter.nbytes for parameter in copied.parameters())
        pointers = {parameter.data_ptr() for parameter in model.parameters() if parameter.numel()}
        assert not pointers.intersection(parameter.data_ptr() for parameter in copied.parameters())
        for owner, _, group in groups_of(copied):
            assert all(part is getattr(copied.get_submodule(owner), name) for name, part in group.linears.items())


@pytest.mark.thorough
@proves("LoRA")
def test_lora(family_case: FamilyCase) -> None:
    """Check that a PEFT adapter for the Hugging Face model's linears gives the same results here, loaded and merged."""
    peft = pytest.importorskip("peft", reason="PEFT is not installed")
    inputs, targets = family_case.inputs(), linears_for_lora(family_case.reference())
    logits: list[Any] = []
    adapters: list[Any] = []
    unexpected: list[Any] = []
    for model in family_case.new_pair():
        torch.manual_seed(SEED)
        # PEFT's initialization is not used, because it would make B zero and hide a lost adapter.
        config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=targets, init_lora_weights=False)
        with_lora = peft.get_peft_model(model, config).eval()
        if not adapters:
            adapters.append(peft.get_peft_model_state_dict(with_lora))
        loaded = peft.set_peft_model_state_dict(with_lora, adapters[0])
        unexpected.append(sorted(loaded.unexpected_keys))  # PEFT renames some keys to names that no model has
        adapters.append(peft.get_peft_model_state_dict(with_lora))
        with torch.no_grad():
            logits.append(with_lora(**inputs).logits)
            with_lora.merge_adapter()  # adds to the weights in place; merge_and_unload below replaces them
            logits.append(with_lora(**inputs).logits)
            with_lora.unmerge_adapter()
            logits.append(with_lora.merge_and_unload(safe_merge=True)(**inputs).logits)
    reference, *reference_merged, actual, first_merged, second_merged = logits
    assert unexpected[1] == unexpected[0]
    assert_same_tensors(adapters[2], adapters[0])
    assert not torch.allclose(reference, family_case.reference()(**inputs).logits, atol=1e-2)
    # Adapters this large produce large logits, and merged weights round differently.
    assert_close(actual, reference, scale=10)
    assert_close([first_merged, second_merged], reference_merged, scale=10)


def linears_for_lora(model: Any) -> list[str]:
    """Return names of linears that PEFT adapts: `nn.Linear` and `Conv1D`, or else subclasses of `nn.Linear` (Falcon's).

    Routers and grouped linears, which PEFT also adapts, are left out, because they compute more than a linear. PEFT
    rejects linears whose weights a kernel reads directly (`out_proj` of a Mamba mixer).
    """
    from peft.tuners.tuners_utils import _check_lora_target_modules_mamba  # PEFT's only list of these linears

    def refused(name: str) -> bool:
        try:
            config: Any = SimpleNamespace(peft_type="LORA")
            _check_lora_target_modules_mamba(config, model, name.rpartition(".")[2])
        except ValueError:
            return True
        return False

    head = model.get_output_embeddings()
    modules = {name: module for name, module in model.named_modules() if module is not head and not refused(name)}
    exact = [name for name, module in modules.items() if type(module) in (nn.Linear, Conv1D)]
    return exact or [name for name, module in modules.items() if isinstance(module, nn.Linear)]
