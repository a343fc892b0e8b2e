"""One architecture under test: two models with the same random weights."""

from __future__ import annotations

import pytest
import torch
from checkpoints import assert_same, hf_tensors, snapshot
from torch import nn
from transformers import Qwen2ForCausalLM as HFQwen2

from nrl_models.families.qwen2.model import Qwen2ForCausalLM
from nrl_models.testing.case import FamilyCase, randomize

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def case() -> FamilyCase:
    return FamilyCase(Qwen2ForCausalLM, CPU)


def test_reference_is_transformers_class(case: FamilyCase) -> None:
    assert case.architecture == "Qwen2ForCausalLM"
    assert case.reference_class is HFQwen2
    assert type(case.reference()) is HFQwen2
    assert type(case.model()) is Qwen2ForCausalLM
    assert case.full_configs["default"].to_dict() == HFQwen2.config_class().to_dict()


def test_full_configs_include_published_sizes(case: FamilyCase) -> None:
    sizes = {name: config.hidden_size for name, config in case.full_configs.items()}
    assert sizes.keys() == {"default", *Qwen2ForCausalLM.published}
    assert sizes["Qwen2.5-7B"] == 3584


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_model_and_reference_have_same_weights(case: FamilyCase, dtype: torch.dtype) -> None:
    reference, model = case.reference(dtype), case.model(dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    assert_same(hf_tensors(model), reference.state_dict())
    assert not model.training
    assert not reference.training


def test_models_are_cached_and_new_pairs_are_copies(case: FamilyCase) -> None:
    assert case.model() is case.model()
    assert case.reference() is case.reference()
    before = snapshot(case.model()), snapshot(case.reference())
    for copied in case.new_pair():
        with torch.no_grad():
            for parameter in copied.parameters():
                parameter.zero_()
    assert_same(case.model().state_dict(), before[0])
    assert_same(case.reference().state_dict(), before[1])


def test_weights_are_deterministic(case: FamilyCase) -> None:
    torch.manual_seed(123)
    again = FamilyCase(Qwen2ForCausalLM, CPU)
    assert again.reference() is not case.reference()
    assert_same(again.reference().state_dict(), case.reference().state_dict())


def test_no_tensor_is_constant(case: FamilyCase) -> None:
    # Default norms are one and biases zero, so swapping or dropping them would change nothing.
    tensors = case.reference().state_dict()
    assert [name for name in tensors if name.endswith("q_proj.bias")]
    assert not [name for name, tensor in tensors.items() if tensor.std() < 0.01]
    for kind in ("norm.weight", "q_proj.bias", "k_proj.bias"):
        alike = [tensor for name, tensor in tensors.items() if name.endswith(kind)]
        assert len({tuple(tensor.tolist()) for tensor in alike}) == len(alike) > 1


def test_randomize_changes_only_constant_tensors() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.random, self.constant = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.zeros(8, 8))
            self.vector, self.scalar = nn.Parameter(torch.randn(8)), nn.Parameter(torch.ones(()))
            self.register_buffer("saved", torch.zeros(4))
            self.register_buffer("computed", torch.zeros(4), persistent=False)
            self.register_buffer("count", torch.zeros(4, dtype=torch.long))

    model = Model()
    before = {name: tensor.clone() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    randomize(model)
    after = dict([*model.named_parameters(), *model.named_buffers()])
    changed = {name for name, tensor in before.items() if not torch.equal(after[name], tensor)}
    assert changed == {"constant", "vector", "scalar", "saved"}
    assert after["constant"].std() > 0.1
