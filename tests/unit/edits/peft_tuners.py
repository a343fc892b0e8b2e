"""All PEFT tuners for linears: trained, saved, loaded with the other library, merged, unloaded."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import peft
import torch
from peft import PeftModel, get_peft_model
from torch import nn

from edits.files import stored
from edits.outcome import TOLERANCE, Outcome
from edits.table import Subject, add, forward, gradients, values
from edits.training import loss_of

PARTS = ["q_proj", "v_proj", "up_proj"]
ALL = ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"]


def config(kind: str, **options: Any) -> partial[peft.PeftConfig]:
    """Create a configuration of this class, by default for `PARTS`. Not cached: tuners store state in it."""
    made = getattr(peft, f"{kind}Config", None)
    if made is None:  # not exported at the top level by this version
        made = getattr(__import__(f"peft.tuners.{kind.lower()}", fromlist=["config"]), f"{kind}Config")
    if "target_modules" in inspect.signature(made).parameters:
        options = {"target_modules": PARTS, **options}
    return partial(made, task_type="CAUSAL_LM", **options)


TUNERS: Mapping[str, partial[peft.PeftConfig]] = {
    "LoRA": config("Lora", r=4),
    "LoRA of all parts": config("Lora", r=4, target_modules=ALL),
    "AdaLoRA": config("AdaLora", init_r=4, target_r=2, total_step=20, tinit=1, tfinal=2),
    "AdaMSS": config("Adamss", r=16, num_subspaces=2, subspace_rank=1),
    "BEFT": config("Beft", target_modules=["q_proj", "v_proj"]),
    "BOFT": config("BOFT", boft_block_size=4),
    "C3A": config("C3A", block_size=16),
    "DEFT": config("Deft", r=4),
    "DeLoRA": config("Delora", r=4),
    "FourierFT": config("FourierFT", n_frequency=50),
    "FRoD": config("Frod", progressbar=False),
    "GLoRA": config("Glora", r=4),
    "GraLoRA": config("Gralora", r=4, gralora_k=2),
    "HiRA": config("Hira", r=4),
    "HRA": config("HRA", r=4),
    "IA3": config("IA3", feedforward_modules=["up_proj"]),
    "Lily": config("Lily", r=4, stride_A=1, num_B=2),
    "norms": config("LNTuning", target_modules=["input_layernorm", "norm"]),
    "LoHa": config("LoHa", r=4),
    "LoKr": config("LoKr", r=4),
    "MiSS": config("Miss", r=4),
    "OFT": config("OFT", oft_block_size=8),
    "OSF": config("OSF", effective_rank=4),
    "PEANuT": config("Peanut", r=4),
    "PSOFT": config("Psoft", r=4),
    "PVeRA": config("Pvera", r=4, projection_prng_key=0),
    "RandLoRA": config("RandLora", r=4, projection_prng_key=0),
    "RoAd": config("Road", group_size=16),
    "SHiRA": config("Shira", r=4, random_seed=0),
    "Supertuning": config("Supertuning", sparsity=0.9),
    "TinyLoRA": config("TinyLora", r=2, u=8, projection_seed=0),
    "Uni-LoRA": config("UniLora", r=4, theta_d_length=64),
    "VB-LoRA": config("VBLoRA", r=4, num_vectors=16, vector_length=32),
    "VeRA": config("Vera", r=4, projection_prng_key=0),
    "WaveFT": config("WaveFT", n_frequency=50),
}

NEEDS = {"AdaMSS": ("sklearn",), "FRoD": ("scipy",), "WaveFT": ("scipy",)}

PROMPTS: Mapping[str, partial[peft.PeftConfig]] = {
    "prompt tuning": config("PromptTuning", num_virtual_tokens=3),
    "prefix tuning": config("PrefixTuning", num_virtual_tokens=3),
    "p-tuning": config("PromptEncoder", num_virtual_tokens=3, encoder_hidden_size=16),
    "trainable tokens": config("TrainableTokens", target_modules=["embed_tokens"], token_indices=[3, 4]),
    "adaption prompt": config("AdaptionPrompt", target_modules=None, adapter_len=3, adapter_layers=1),
}


def adapted(subject: Subject, of_config: Callable[[], peft.PeftConfig]) -> PeftModel:
    """Add a random adapter to the subject's model, the same for both libraries."""
    torch.manual_seed(3)
    model = get_peft_model(subject.model, of_config())
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in model.parameters():
            # Adapters start without an effect. Random weights make them visible immediately.
            if parameter.requires_grad and parameter.is_floating_point() and parameter.numel():
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.02)
    return model


def trained(subject: Subject, model: nn.Module, steps: int = 2) -> dict[str, Outcome]:
    """Return the trained parameters after some SGD steps, and the last gradients."""
    model.train()
    torch.manual_seed(5)
    for _ in range(steps):
        model.zero_grad()
        loss_of(subject, model).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=0.05)
    model.eval()
    trains = {name: value.detach().clone() for name, value in model.named_parameters() if value.requires_grad}
    found = {name: value for name, value in gradients(model).items() if value is not None}
    return {"trains": trains, "gradients": found}


def train_and_reload(subject: Subject, of_config: Callable[[], peft.PeftConfig]) -> Outcome:
    """Train, save, and load into a model of the other library."""
    model = adapted(subject, of_config)
    outcome = trained(subject, model)
    model.save_pretrained(subject.folder)
    reloaded = PeftModel.from_pretrained(subject.other(), subject.folder).eval()
    return {
        **outcome,
        "logits": forward(subject, model),
        "reloaded": forward(subject, reloaded),
        "files": stored(subject.folder),
    }


def merge(subject: Subject, of_config: Callable[[], peft.PeftConfig]) -> Outcome:
    """Merge and unmerge in place, disable with `disable_adapter`, then merge permanently."""
    model = adapted(subject, of_config)
    trained(subject, model, 1)
    outcome = {"logits": forward(subject, model)}
    model.merge_adapter()
    outcome["in place"] = forward(subject, model)
    try:
        model.unmerge_adapter()
    except NotImplementedError as error:
        outcome["unmerged"] = str(error)
    else:
        outcome["unmerged"] = forward(subject, model)
    with model.disable_adapter():
        outcome["disabled"] = forward(subject, model)
    whole = model.merge_and_unload()
    outcome["merged"] = forward(subject, whole)
    outcome["types"] = [type(subject.q), type(subject.k), type(subject.up)]
    return {**outcome, "values": values(whole)}


def unload(subject: Subject, of_config: Callable[[], peft.PeftConfig]) -> Outcome:
    """Train, then unload: the model is unchanged."""
    model = adapted(subject, of_config)
    trained(subject, model, 1)
    whole = model.unload()
    return {"logits": forward(subject, whole), "values": values(whole)}


for name, of_config in {**TUNERS, **PROMPTS}.items():
    options: dict[str, Any] = {
        "which": "qwen2" if name == "BEFT" else "llama",
        "needs": NEEDS.get(name, ()),
        # RandLoRA multiplies long products of random matrices, which amplifies rounding.
        "tolerance": 2e-4 if name == "RandLoRA" else TOLERANCE,
    }

    def bound(apply: Callable[..., Outcome], of_config: Callable = of_config) -> Callable[[Subject], Outcome]:
        return lambda subject: apply(subject, of_config)

    add(f"{name}: trained, saved, loaded over the other", bound(train_and_reload), **options)
    if name in TUNERS:
        add(f"{name}: unloaded", bound(unload), **options)
        raises = NotImplementedError if name == "Lily" else None  # its adapters depend on each other
        add(f"{name}: merged", bound(merge), raises=raises, **options)
