"""State dicts and weights that cannot be saved: without names, or in dtypes that need scales."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import assert_same, stored

from nrl_models import AutoModelForCausalLM, StateDictError, UnknownArgumentError, registry
from nrl_models.testing.case import FamilyCase

DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.int32, torch.bool)


@pytest.fixture(params=["LlamaForCausalLM", "MixtralForCausalLM"])
def model(request: pytest.FixtureRequest) -> Any:
    return copy.deepcopy(FamilyCase(registry.model_class(request.param)).model())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_saving_state_dict_in_dtype_without_scales_raises(model: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    complete = model.state_dict()
    given = {name: tensor.to(dtype) if tensor.ndim > 1 else tensor for name, tensor in complete.items()}
    with pytest.raises(StateDictError, match="quantized weights cannot be saved") as caught:
        model.save_pretrained(tmp_path / "saved", state_dict=given)
    subjects = [problem.subject for problem in caught.value.problems]
    assert subjects == [name for name, tensor in complete.items() if tensor.ndim > 1]
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8], ids=str)
@pytest.mark.parametrize("passes_state_dict", [True, False])
def test_saving_weights_cast_in_place_raises(
    model: Any, dtype: torch.dtype, passes_state_dict: bool, tmp_path: Path
) -> None:
    complete = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.requires_grad_(False)
    weights = {name: weight for name, weight in model.named_parameters() if "layers.1" in name or "head" in name}
    for weight in weights.values():
        weight.data = weight.data.to(dtype)
    state_dict = model.state_dict() if passes_state_dict else None
    with pytest.raises(StateDictError, match="quantized weights cannot be saved") as caught:
        model.save_pretrained(tmp_path / "saved", state_dict=state_dict)
    assert {problem.subject for problem in caught.value.problems} == weights.keys()
    assert not (tmp_path / "saved").exists()
    model.save_pretrained(tmp_path / "complete", state_dict=complete)  # other values may be saved
    model.load_state_dict(complete, assign=True)
    model.save_pretrained(tmp_path / "assigned")
    assert_same(stored(tmp_path / "complete"), stored(tmp_path / "assigned"))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_saving_and_exporting_model_cast_as_a_whole_raises(model: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    """Such a model has no parameter whose dtype could be torch's default."""
    model.requires_grad_(False)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    with pytest.raises(StateDictError, match="quantized weights cannot be saved") as caught:
        model.save_pretrained(tmp_path / "saved")
    assert "model.norm.weight" in [problem.subject for problem in caught.value.problems]
    assert not (tmp_path / "saved").exists()
    with pytest.raises(StateDictError, match="quantized weights cannot be exported"):
        next(model.state_dict_adapter.iter_export(model))


@pytest.mark.parametrize("source", ["parameter", "state_dict", "model"])
def test_saving_complex_weights_raises(model: Any, source: str, tmp_path: Path) -> None:
    """Loading would cast them to floats, and drop their imaginary parts."""
    name, state_dict = "model.norm.weight", None
    cast = model.get_parameter(name).detach().to(torch.complex64)
    if source == "state_dict":
        state_dict = {**model.state_dict(), name: cast}
    elif source == "parameter":
        model.model.norm.weight = torch.nn.Parameter(cast)
    else:
        model.to(torch.complex64)
    with pytest.raises(StateDictError, match="complex weights cannot be saved") as caught:
        model.save_pretrained(tmp_path / "saved", state_dict=state_dict)
    assert name in [problem.subject for problem in caught.value.problems]
    assert (len(caught.value.problems) == 1) == (source != "model")
    assert not (tmp_path / "saved").exists()
    if source != "state_dict":
        with pytest.raises(StateDictError, match="complex weights cannot be exported"):
            next(model.state_dict_adapter.iter_export(model))


def test_complex_buffer_is_saved(model: Any, tmp_path: Path) -> None:
    model.model.register_buffer("phases", torch.ones(2, dtype=torch.complex64))
    model.save_pretrained(tmp_path)
    assert stored(tmp_path)["model.phases"].dtype == torch.complex64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_state_dict_in_other_floating_point_dtype_is_saved(model: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    given = {name: tensor.to(dtype) for name, tensor in model.state_dict().items()}
    model.save_pretrained(tmp_path, state_dict=given)
    assert {tensor.dtype for tensor in stored(tmp_path).values()} == {dtype}


@pytest.mark.parametrize("kind", ["generator", "list", "int keys"])
def test_state_dict_without_names_raises_like_loading(model: Any, kind: str, tmp_path: Path) -> None:
    tensors = model.state_dict()
    given: Any = {"generator": iter(tensors.items()), "list": list(tensors.items()), "int keys": {1: torch.ones(1)}}[
        kind
    ]
    messages = []
    for call in (
        lambda: model.save_pretrained(tmp_path / "saved", state_dict=given),
        lambda: AutoModelForCausalLM.from_pretrained(None, config=model.config, state_dict=given),
    ):
        with pytest.raises(
            UnknownArgumentError, match=r"state_dict .*expected a mapping of names to tensors"
        ) as caught:
            call()
        messages.append(str(caught.value))
    assert messages[0] == messages[1]
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize("form", ["sparse", "nested", "meta"])
def test_state_dict_without_dense_values_raises(form: str, model: Any, tmp_path: Path) -> None:
    forms: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "sparse": torch.Tensor.to_sparse,
        "nested": lambda tensor: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "meta": lambda tensor: tensor.to("meta"),
    }
    state_dict = model.state_dict()
    state_dict["lm_head.weight"] = forms[form](state_dict["lm_head.weight"].detach())
    with pytest.raises(StateDictError, match=r"lm_head.weight"):
        model.save_pretrained(tmp_path, state_dict=state_dict)
    assert not [*tmp_path.iterdir()]
    with pytest.raises(UnknownArgumentError, match=r"lm_head.weight"):
        AutoModelForCausalLM.from_pretrained(None, config=model.config, state_dict=state_dict)
    if form != "meta":  # shapes can be converted
        with pytest.raises(StateDictError, match=r"lm_head.weight"):
            model.state_dict_adapter.from_hf(state_dict)
