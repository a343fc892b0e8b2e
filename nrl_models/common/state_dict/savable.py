"""Check that saved weights could be loaded: files have no scales for weights in integer or 8-bit dtypes."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from transformers import PreTrainedModel

from nrl_models.common.dtypes import dtype_name
from nrl_models.common.state_dict.adapter import StateDictAdapter
from nrl_models.common.state_dict.layouts import TensorSpec
from nrl_models.common.state_dict.matching import is_wide_float
from nrl_models.common.state_dict.own_tensors import as_built, require_unquantized, stored_formats
from nrl_models.errors import Problem, ProblemKind, StateDictError

_ADVICE = (
    "save before quantizing; to save quantized weights, load the saved checkpoint with "
    "from_pretrained(quantization_config=...), whose save_pretrained writes them"
)


def require_savable(model: nn.Module) -> None:
    """Raise if weights were quantized in place by torch or torchao, whose format no checkpoint describes.

    Raises:
        StateDictError: If there are any. Lists all weights.
    """
    require_unquantized(stored_formats(model).opaque, "saved", _ADVICE)


def require_wide_weights(
    model: PreTrainedModel, adapter: StateDictAdapter, tensors: Mapping[str, torch.Tensor | TensorSpec]
) -> None:
    """Raise if floating-point weights would be saved in another kind of dtype, such as int8 or float8.

    Modules that store scales next to their quantized weights are allowed (bitsandbytes and HQQ in place).

    Args:
        model: The model, without PEFT.
        adapter: The model's adapter.
        tensors: Own tensors to save, all or some.

    Raises:
        StateDictError: If there are any. Lists all weights.
    """
    narrow = {
        name: tensor.dtype
        for name, tensor in tensors.items()
        if not is_wide_float(tensor.dtype) and (is_wide_float(adapter.own[name].dtype) or name in adapter.quantized)
    }
    if narrow:
        packed, names = stored_formats(model).packed, as_built(model).state_dict().keys()
        has_scales = {name.rpartition(".")[0] for name in adapter.own.keys() - names}
        narrow = {
            name: dtype
            for name, dtype in narrow.items()
            if name not in packed and name.rpartition(".")[0] not in has_scales
        }
    if problems := [
        Problem(ProblemKind.DTYPE, name, f"is {dtype_name(dtype)}, expected a floating-point dtype of at least 16 bits")
        for name, dtype in narrow.items()
    ]:
        raise StateDictError("quantized weights cannot be saved, because files would lack scales", problems, [_ADVICE])
