"""Checkpoints of wrapped models (DDP, torch.compile, FSDP, PEFT) raise an error with the keyword that loads them."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from nrl_models import AutoModelForCausalLM
from nrl_models.errors import CheckpointError
from tests.unit.checkpoints import assert_same_model, edit_weights


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda key: f"module.{key}",
        lambda key: f"_orig_mod.{key}",
        lambda key: f"module._orig_mod.{key}",
        lambda key: f"base_model.model.{key}",
        lambda key: key.replace("model.layers.", "model._fsdp_wrapped_module.layers."),
        lambda key: re.sub(r"(layers\.\d+\.)", r"\1_checkpoint_wrapped_module.", key),
    ],
    ids=["ddp", "compile", "ddp-of-compile", "peft", "fsdp", "checkpointing"],
)
def test_names_of_wrapped_model(wrapped: Callable[[str], str], folder: Path, llama: PreTrainedModel) -> None:
    def rename(tensors: dict) -> None:
        for key in list(tensors):
            tensors[wrapped(key)] = tensors.pop(key)

    edit_weights(folder, rename)
    with pytest.raises(CheckpointError, match="saved from a wrapped model") as caught:
        AutoModelForCausalLM.from_pretrained(folder)
    assert "strict=False" not in str(caught.value)
    mapping = re.search(r"key_mapping=(\{.*\})", str(caught.value))
    assert mapping is not None
    assert_same_model(AutoModelForCausalLM.from_pretrained(folder, key_mapping=ast.literal_eval(mapping[1])), llama)


def test_other_unexpected_names_have_no_such_advice(folder: Path) -> None:
    edit_weights(folder, lambda tensors: tensors.update({"module.extra.weight": tensors["lm_head.weight"].clone()}))
    with pytest.raises(CheckpointError, match="strict=False") as caught:
        AutoModelForCausalLM.from_pretrained(folder)
    assert "wrapped model" not in str(caught.value)
