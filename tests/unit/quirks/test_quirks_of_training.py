"""Quirks of training. Without the workaround the bug shows, and with it it does not."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import quirk_probes as probes
import torch
from checkpoints import edit_weights
from torch import nn
from versions import case_of, since

from nrl_models import AutoModelForCausalLM, freeze, freeze_unreachable, registry, trainable_parameters
from nrl_models.common.flags import ModelFlag
from nrl_models.common.forward.routing import flip_rate, record_routing, replay_routing
from nrl_models.diagnostics.embeddings import diagnose_embeddings
from nrl_models.distributed.checked_plan import plan_for
from nrl_models.distributed.parallelize import divide_model
from nrl_models.errors import UnknownArgumentError
from nrl_models.logprobs import token_logprobs
from nrl_models.parity.noise import rounded_otherwise
from nrl_models.testing.case import FamilyCase

IMAGES = FamilyCase(registry.model_class("Gemma3ForConditionalGeneration"))
PLAIN = FamilyCase(registry.model_class("LlamaForCausalLM"))
MOE = FamilyCase(registry.model_class("MixtralForCausalLM"))


def without_state(case: FamilyCase, model: nn.Module) -> set[str]:
    """Return the parameters without optimizer state after a step on text, although the optimizer received them."""
    trained = trainable_parameters(model)
    optimizer = torch.optim.SGD(trained, lr=1e-3, momentum=0.9)
    model(**case.inputs(labels=True, images=False)).loss.backward()
    optimizer.step()
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {names[parameter] for parameter in trained if parameter not in optimizer.state}


def test_symptom_of_unreachable_parameters() -> None:
    assert any("vision_tower" in name for name in without_state(IMAGES, IMAGES.new_pair()[1].train()))


def test_cure_of_unreachable_parameters() -> None:
    model = IMAGES.new_pair()[1].train()
    inputs = IMAGES.inputs(labels=True, images=False)
    assert freeze_unreachable(model, lambda: model(**inputs).loss)
    assert without_state(IMAGES, model) == set()


def test_symptom_of_misspelled_freezing() -> None:
    model = IMAGES.new_pair()[1]
    for parameter in model.model.vision_tower.parameters():
        parameter.requires_gradient = False
    assert len(trainable_parameters(model)) == len(list(model.parameters()))


def test_cure_of_misspelled_freezing() -> None:
    with pytest.raises(UnknownArgumentError, match=r"freeze_vision_towers \(did you mean freeze_vision_tower\?\)"):
        freeze(IMAGES.new_pair()[1], {"freeze_vision_towers": True})


def test_symptom_of_tied_weights_under_tp() -> None:
    assert probes.parallelize_module_unties_weights()


def test_cure_of_tied_weights_under_tp() -> None:
    model_class = registry.model_class("Gemma3ForCausalLM")
    assert ModelFlag.SKIP_DTENSOR_TIED_WEIGHTS_CHECK in model_class.flags
    model = model_class.from_config(FamilyCase(model_class).config)
    assert model.config.tie_word_embeddings
    with probes.fake_mesh(2) as mesh:
        divide_model(model, mesh, plan_for(model, mesh))
        words, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        assert words is head
        assert words.to_local().shape[0] == words.shape[0] // 2


def routing_of(model: nn.Module, replayed: dict | None = None) -> dict:
    """Record the chosen experts. With `replayed`, run with other rounding."""
    inputs = MOE.inputs(batch=16, length=128)
    with torch.no_grad(), record_routing(model) as record:
        if replayed is None:
            model(**inputs, use_cache=False)
        else:
            with rounded_otherwise(model):
                model(**inputs, use_cache=False)
    return dict(record)


@pytest.mark.long
def test_symptom_of_routing_flips() -> None:
    model = MOE.model(torch.bfloat16)
    assert flip_rate(routing_of(model), routing_of(model, {})) > 0


def test_cure_of_routing_flips() -> None:
    """Recomputation uses the recorded experts, although the router would choose others."""
    model = MOE.new_pair()[1].train()
    inputs = MOE.inputs(labels=True)
    record = {name: [choice.flip(0) for choice in choices] for name, choices in _chosen(model, inputs).items()}
    gradients = []
    for checkpointing in (False, True):
        one = copy.deepcopy(model)
        if checkpointing:
            one.gradient_checkpointing_enable()
        with replay_routing(one, record):
            one(**inputs, use_cache=False).loss.backward()
        gradients.append({name: parameter.grad for name, parameter in one.named_parameters()})
    torch.testing.assert_close(gradients[1], gradients[0], atol=1e-6, rtol=1e-5)
    model(**inputs, use_cache=False).loss.backward()  # with the router's own choice
    name = next(name for name in gradients[0] if "experts" in name)
    assert (dict(model.named_parameters())[name].grad - gradients[0][name]).abs().max() > 1e-5


def _chosen(model: nn.Module, inputs: dict) -> dict:
    with torch.no_grad(), record_routing(model) as record:
        model(**inputs, use_cache=False)
    return dict(record)


def test_symptom_of_full_vocabulary_logits() -> None:
    assert probes.full_logits_are_allocated(PLAIN.model(), PLAIN.inputs())


def test_cure_of_full_vocabulary_logits() -> None:
    case = FamilyCase(PLAIN.model_class, tiny={"vocab_size": 4096})
    model, tokens = case.model(), case.inputs()["input_ids"]
    full_size = tokens.numel() * model.config.vocab_size
    with probes.new_tensors(4096) as sizes, torch.no_grad():
        chunked = token_logprobs(model, tokens, chunk_size=4)
    assert max(sizes) < full_size / 2
    with probes.new_tensors(4096) as sizes, torch.no_grad():
        expected = token_logprobs(model, tokens, chunk_size=None)
    assert max(sizes) > full_size / 2
    torch.testing.assert_close(chunked.logprobs, expected.logprobs, atol=1e-5, rtol=1e-5, equal_nan=True)


@pytest.fixture
def with_untrained_row(folder: Path) -> Path:
    """Save a checkpoint with a reserved token."""
    edit_weights(folder, lambda tensors: tensors["model.embed_tokens.weight"][100].zero_())
    return folder


def largest_gradient(folder: Path, row: int) -> float:
    """Return a row's gradient relative to the largest of all other rows."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.randint(16, 90, (2, 12), generator=torch.Generator().manual_seed(0))
    tokens[0, 3] = row
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    sizes = model.get_input_embeddings().weight.grad.norm(dim=1)
    return float(sizes[row] / torch.cat([sizes[:row], sizes[row + 1 :]]).max())


def test_symptom_of_untrained_rows(with_untrained_row: Path) -> None:
    assert largest_gradient(with_untrained_row, 100) > 10


def test_cure_of_untrained_rows(with_untrained_row: Path, tmp_path: Path) -> None:
    report = diagnose_embeddings(with_untrained_row, reinitialize=tmp_path / "healthy")
    assert not report.passed
    first = report.measured["embeddings"][0]
    assert (first["near_zero"], first["padding"]) == ([100], 0)
    assert largest_gradient(tmp_path / "healthy", 100) < 10


FUSED = case_of("NemotronHForCausalLM")


@since("5.15")
def test_symptom_of_fused_out_projection(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FUSED.new_pair()[1].train()
    mixer = next(module for module in model.modules() if hasattr(module, "A_log"))
    seen: list[str] = []

    def fused(projected: torch.Tensor, *args: object, outproj_weight: torch.Tensor, **options: object) -> torch.Tensor:
        seen.append("kernel" if outproj_weight is mixer.out_proj.weight else "another kernel")
        return projected.new_zeros(*projected.shape[:2], outproj_weight.shape[0]) + outproj_weight.sum()

    upstream = next(base for base in type(mixer).__mro__ if base.__module__.startswith("transformers."))
    module = __import__(upstream.__module__, fromlist=["_"])
    monkeypatch.setattr(module, "mamba2_split_conv1d_scan_combined", fused)
    mixer.out_proj.register_forward_hook(lambda *_: seen.append("hook"))
    mixer(torch.randn(1, 8, model.config.hidden_size))
    if "kernel" not in seen:
        pytest.skip("this release calls the kernel where there is a GPU only")
    assert seen == ["kernel"]


def test_cure_of_fused_out_projection() -> None:
    """With the workaround, PEFT raises an error for this linear. Without this linear, an adapter works."""
    peft = pytest.importorskip("peft")
    with pytest.raises(ValueError, match="out_proj"):
        peft.get_peft_model(FUSED.new_pair()[1], peft.LoraConfig(target_modules=["out_proj"]))
    adapted = peft.get_peft_model(FUSED.new_pair()[1], peft.LoraConfig(target_modules=["q_proj", "o_proj"]))
    assert any(parameter.requires_grad for parameter in adapted.parameters())
