"""Quantization by torch, torchao, HQQ and bitsandbytes: the linears they find, and the results."""

from __future__ import annotations

import torch
from torch import nn
from transformers import AutoModelForCausalLM, TorchAoConfig

from edits.outcome import Outcome
from edits.table import Subject, edit, forward, gradients, values
from edits.training import loss_of


def types(subject: Subject) -> dict[str, str]:
    """Return the class of each projection."""
    return {name: type(m).__name__ for name, m in subject.model.named_modules() if name.endswith("_proj")}


def kinds_of_weights(subject: Subject) -> dict[str, str]:
    """Return the class of each projection's weight."""
    linears = ((name, m) for name, m in subject.model.named_modules() if name.endswith("_proj"))
    return {name: type(module.weight).__name__ for name, module in linears}


@edit()
def quantize_dynamic_of_torch(subject: Subject) -> Outcome:
    """Finds linears by their exact type, and replaces them."""
    subject.model = torch.ao.quantization.quantize_dynamic(subject.model, {nn.Linear}, dtype=torch.qint8)
    return {"logits": forward(subject), "seen": types(subject)}


@edit()
def quantize_dynamic_of_one_linear(subject: Subject) -> Outcome:
    """Quantizes only `k_proj`, by name."""
    spec = {"model.layers.0.self_attn.k_proj": torch.ao.quantization.default_dynamic_qconfig}
    torch.ao.quantization.quantize_dynamic(subject.model, spec, inplace=True)
    return {"logits": forward(subject), "seen": types(subject)}


@edit()
def weights_are_rounded_to_eight_bits_by_hand(subject: Subject) -> Outcome:
    """Replace each linear's weight by an int8 buffer and a scale, and replace its class."""

    class Rounded(nn.Module):
        def __init__(self, linear: nn.Linear) -> None:
            super().__init__()
            scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
            self.register_buffer("scale", scale)
            self.register_buffer("rounded", (linear.weight.detach() / scale).round().to(torch.int8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(x, self.rounded.float() * self.scale)

    for layer in subject.model.model.layers:
        for owner in (layer.self_attn, layer.mlp):
            for name, linear in list(owner.named_children()):
                if type(linear) is nn.Linear:
                    setattr(owner, name, Rounded(linear))
    return {"logits": forward(subject), "values": values(subject.model)}


@edit()
def straight_through_rounding(subject: Subject) -> Outcome:
    """Quantization-aware training: a parametrization rounds weights in the forward pass."""

    class Rounding(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight + ((weight * 16).round() / 16 - weight).detach()

    for module in list(subject.model.modules()):
        if type(module) is nn.Linear:
            nn.utils.parametrize.register_parametrization(module, "weight", Rounding())
    loss_of(subject).backward()
    return gradients(subject.model)


# torchao


@edit(needs=("torchao",))
def torchao_eight_bit_weights(subject: Subject) -> Outcome:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(subject.model, Int8WeightOnlyConfig())
    return {"logits": forward(subject), "seen": kinds_of_weights(subject)}


@edit(needs=("torchao",), tolerance=2e-4)
def torchao_eight_bit_activations_of_some_linears(subject: Subject) -> Outcome:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    def wanted(module: nn.Module, name: str) -> bool:
        return isinstance(module, nn.Linear) and name.endswith(("k_proj", "up_proj"))

    quantize_(subject.model, Int8WeightOnlyConfig(), filter_fn=wanted)
    return {"logits": forward(subject), "seen": kinds_of_weights(subject)}


@edit(needs=("torchao",))
def torchao_through_transformers(subject: Subject) -> Outcome:
    """`from_pretrained` with a quantization config, on a checkpoint of the other library."""
    from torchao.quantization import Int8WeightOnlyConfig

    import nrl_models

    subject.other().save_pretrained(subject.folder)
    loader = AutoModelForCausalLM if subject.library == "transformers" else nrl_models.AutoModelForCausalLM
    config = TorchAoConfig(Int8WeightOnlyConfig())
    subject.model = loader.from_pretrained(subject.folder, quantization_config=config, attn_implementation="eager")
    return {"logits": forward(subject), "seen": kinds_of_weights(subject)}


# HQQ


@edit(needs=("hqq",))
def hqq_by_hand(subject: Subject) -> Outcome:
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

    config = BaseQuantizeConfig(nbits=4, group_size=32)
    for layer in subject.model.model.layers:
        for owner in (layer.self_attn, layer.mlp):
            for name, linear in list(owner.named_children()):
                if isinstance(linear, nn.Linear):
                    quantized = HQQLinear(linear, config, compute_dtype=torch.float32, device="cpu", del_orig=True)
                    setattr(owner, name, quantized)
    return {"logits": forward(subject), "seen": types(subject)}


@edit(needs=("hqq",))
def hqq_of_model(subject: Subject) -> Outcome:
    """HQQ's own traversal of a model."""
    from hqq.core.quantize import BaseQuantizeConfig
    from hqq.models.hf.base import AutoHQQHFModel

    config = BaseQuantizeConfig(nbits=4, group_size=32)
    AutoHQQHFModel.quantize_model(subject.model, config, compute_dtype=torch.float32, device="cpu")
    return {"logits": forward(subject), "seen": types(subject)}


# bitsandbytes


@edit(needs=("bitsandbytes",))
def bitsandbytes_four_bits(subject: Subject) -> Outcome:
    from transformers import BitsAndBytesConfig

    import nrl_models

    subject.other().save_pretrained(subject.folder)
    loader = AutoModelForCausalLM if subject.library == "transformers" else nrl_models.AutoModelForCausalLM
    # Its blocks have 64 numbers, so `down_proj` with 96 inputs stays unquantized.
    skip = ["lm_head", "down_proj"]
    config = BitsAndBytesConfig(load_in_4bit=True, llm_int8_skip_modules=skip, bnb_4bit_compute_dtype=torch.float32)
    subject.model = loader.from_pretrained(
        subject.folder, quantization_config=config, device_map="cpu", attn_implementation="eager"
    )
    return {"logits": forward(subject), "seen": types(subject)}
