"""A correct family, and families with one bug each, as users outside of this repository might write them."""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers.models.llama import modeling_llama as hf
from transformers.models.opt import modeling_opt as opt
from transformers.models.qwen2 import modeling_qwen2 as biased

from nrl_models.common.documents.packing import KeepsDocumentsApart
from nrl_models.common.projections import CombinedGateUp, CombinedProjections, CombinedQKV, LinearGroup
from nrl_models.common.upstream import CACHE_NAMES
from nrl_models.family import FamilyModel


class LlamaAttention(CombinedQKV, hf.LlamaAttention):
    pass


class LlamaMLP(CombinedGateUp, hf.LlamaMLP):
    pass


class Nova(FamilyModel):
    rewrites = {hf.LlamaAttention: LlamaAttention, hf.LlamaMLP: LlamaMLP}
    tiny = {"num_hidden_layers": 1}


class NovaForCausalLM(Nova, hf.LlamaForCausalLM):
    """Correct."""


class OtherOrderMLP(CombinedProjections, hf.LlamaMLP):
    combined = {"gate_up_proj": ("up_proj", "gate_proj")}


class OtherOrderForCausalLM(Nova, hf.LlamaForCausalLM):
    """Correct: the order of rows in memory is irrelevant."""

    rewrites = Nova.rewrites | {hf.LlamaMLP: OtherOrderMLP}


class Swapped(hf.LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))


class SwappedMLP(CombinedGateUp, Swapped):
    pass


class SwappedForCausalLM(Nova, hf.LlamaForCausalLM):
    """Swaps gate and up."""

    rewrites = Nova.rewrites | {hf.LlamaMLP: SwappedMLP}


class Detached(hf.LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x).detach())


class DetachedMLP(CombinedGateUp, Detached):
    pass


class DetachedForCausalLM(Nova, hf.LlamaForCausalLM):
    """The same output, but `up_proj` receives no gradient."""

    rewrites = Nova.rewrites | {hf.LlamaMLP: DetachedMLP}


class Unmasked(CombinedQKV, hf.LlamaAttention):
    def forward(self, *args: Any, attention_mask: torch.Tensor | None = None, **kwargs: Any) -> Any:
        return super().forward(*args, attention_mask=None, **kwargs)


class UnmaskedForCausalLM(Nova, hf.LlamaForCausalLM):
    """Causal, but attends to padding and to other documents."""

    rewrites = Nova.rewrites | {hf.LlamaAttention: Unmasked}


class Forgetful(CombinedQKV, hf.LlamaAttention):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs | dict.fromkeys(kwargs.keys() & {*CACHE_NAMES}))


class ForgetfulForCausalLM(Nova, hf.LlamaForCausalLM):
    """Ignores the cache."""

    rewrites = Nova.rewrites | {hf.LlamaAttention: Forgetful}


class ShiftedNorm(hf.LlamaRMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 1e-3 * x


class ShiftedForCausalLM(Nova, hf.LlamaForCausalLM):
    """Has a custom layer with slightly different output."""

    rewrites = Nova.rewrites | {hf.LlamaRMSNorm: ShiftedNorm}


class UndeclaredForCausalLM(Nova, hf.LlamaForCausalLM):
    """Does not declare that gate and up share an input."""

    rewrites = {hf.LlamaAttention: LlamaAttention}


class Unbiased(LinearGroup):
    def outputs_with(self, *args: Any) -> tuple[torch.Tensor, ...]:
        outputs = super().outputs_with(*args)
        return tuple(output - part.bias for output, part in zip(outputs, self.linears.values(), strict=True))


class UnbiasedAttention(CombinedQKV, biased.Qwen2Attention):
    def combine_projections(self, name: str = "") -> None:
        super().combine_projections(name)
        self.qkv_proj.__class__ = Unbiased


class Qwen2MLP(CombinedGateUp, biased.Qwen2MLP):
    pass


class UnbiasedForCausalLM(Nova, biased.Qwen2ForCausalLM):
    """Loads and saves the biases of q, k and v, but does not add them. New models have zero biases."""

    rewrites = {biased.Qwen2Attention: UnbiasedAttention, biased.Qwen2MLP: Qwen2MLP}


class BufferForCausalLM(Nova, hf.LlamaForCausalLM):
    """Saves a tensor that the Hugging Face model does not have."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_buffer("scale", torch.ones(1))


class ApartForCausalLM(Nova, hf.LlamaForCausalLM):
    """Does not tie weights that should be tied."""

    def tie_weights(self, *args: Any, **kwargs: Any) -> None:
        pass


NOT_A_FAMILY = LlamaMLP


# Limits: one that transformers' class shares, one that hides a bug, and one without any effect.


class Lacking(FamilyModel):
    rewrites = {opt.OPTAttention: CombinedQKV}
    limits = {"packed sequences": "transformers' OPT lets documents see each other"}
    tiny = {"num_hidden_layers": 1}


class LackingForCausalLM(Lacking, opt.OPTForCausalLM):
    """Correct: transformers' class has the same limit. Neither it nor its submodules separate documents."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for module in self.modules():
            if isinstance(module, KeepsDocumentsApart):
                module.__class__ = module.wraps

    @functools.wraps(opt.OPTForCausalLM.forward)
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return opt.OPTForCausalLM.forward(self, *args, **kwargs)

    forward.keeps_documents_apart = True  # type: ignore[attr-defined]


class UnstatedForCausalLM(LackingForCausalLM):
    """Has the limit of transformers' class, and does not state it."""

    limits = dict[str, str]()


class CrashingForCausalLM(Lacking, opt.OPTForCausalLM):
    """Raises an error if transformers' class gives a different output, which its limit does not state."""

    def forward(self, *args: Any, position_ids: torch.Tensor | None = None, **kwargs: Any) -> Any:
        if position_ids is not None and (position_ids.diff() < 0).any():
            raise TypeError("a bug in this class")
        return super().forward(*args, position_ids=position_ids, **kwargs)


class GoneForCausalLM(Nova, hf.LlamaForCausalLM):
    """Declares a limit for a feature that it supports."""

    limits = {"left padding": "it is said to be lacking"}
