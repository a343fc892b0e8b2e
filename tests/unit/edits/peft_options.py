"""Options of PEFT's LoRA: initialization, patterns, biases, modules to save, target parameters, several adapters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from peft import (
    EvaConfig,
    LoraConfig,
    PeftModel,
    get_peft_model,
    get_peft_model_state_dict,
    inject_adapter_in_model,
    set_peft_model_state_dict,
)
from torch import nn

from edits.files import stored
from edits.outcome import Outcome
from edits.peft_tuners import PARTS, adapted, train_and_reload, trained
from edits.table import Subject, add, edit, forward, gradients, step, values
from edits.training import loss_of


def lora(**options: Any) -> LoraConfig:
    """Return a LoRA configuration of rank 4 for `PARTS`, without dropout."""
    return LoraConfig(**{"r": 4, "target_modules": PARTS, "task_type": "CAUSAL_LM", **options})


def train_reload_merge(subject: Subject, **options: Any) -> Outcome:
    """Train, save, load with the other library, and merge."""
    outcome = train_and_reload(subject, lambda: lora(**options))
    # The tuner has modified the model in place, so it is still wrapped.
    wrapped = PeftModel.from_pretrained(subject.new(), subject.folder)
    merged = wrapped.merge_and_unload()
    return {**outcome, "merged": forward(subject, merged), "values": values(merged)}


OPTIONS: dict[str, dict[str, Any]] = {
    "rsLoRA": {"use_rslora": True},
    "DoRA": {"use_dora": True},
    "all linears": {"target_modules": "all-linear"},
    "a pattern": {"target_modules": r".*layers\.1\..*(k|v|gate)_proj"},
    "names of one layer": {"target_modules": ["layers.0.self_attn.k_proj", "layers.1.mlp.up_proj"]},
    "the query alone": {"target_modules": ["q_proj"]},
    "the key alone": {"target_modules": ["k_proj"]},
    "layers to transform": {"layers_to_transform": [1], "layers_pattern": "layers"},
    "ranks by pattern": {"rank_pattern": {"q_proj": 8, "layers.1.self_attn.v_proj": 2}, "alpha_pattern": {"v": 4}},
    "excluded modules": {"target_modules": "all-linear", "exclude_modules": ["v_proj", "lm_head"]},
    "gaussian start": {"init_lora_weights": "gaussian"},
    "orthogonal start": {"init_lora_weights": "orthogonal"},
    "PiSSA": {"init_lora_weights": "pissa"},
    "PiSSA, iterative": {"init_lora_weights": "pissa_niter_4"},
    "OLoRA": {"init_lora_weights": "olora"},
    "LoRA-FA's dropout": {"lora_dropout": 0.3},
    "a whole v_proj": {"target_modules": ["q_proj"], "modules_to_save": ["v_proj"]},
    "a whole MLP": {"target_modules": ["q_proj"], "modules_to_save": ["mlp"]},
    "a whole attention": {"target_modules": ["gate_proj"], "modules_to_save": ["self_attn"]},
    "a whole head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "whole embeddings": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    "trained tokens": {"trainable_token_indices": [3, 4]},
    "the weight of k_proj as target": {"target_modules": ["q_proj"], "target_parameters": ["k_proj.weight"]},
    "the weight of up_proj as target": {"target_modules": [], "target_parameters": ["up_proj.weight"]},
}

for name, options in OPTIONS.items():
    add(f"LoRA with {name}", lambda subject, options=options: train_reload_merge(subject, **options))

for bias in ("lora_only", "all"):
    add(f"LoRA with bias={bias!r}", lambda s, bias=bias: train_reload_merge(s, bias=bias), which="qwen2")

add(
    "LoRA with a bias of its own",
    lambda s: train_reload_merge(s, lora_bias=True, target_modules=["q_proj", "v_proj"]),
    which="qwen2",
)

for targets in (["experts.gate_up_proj"], ["experts.gate_up_proj", "experts.down_proj"]):

    def of_experts(subject: Subject, targets: list[str] = targets) -> Outcome:
        return train_reload_merge(subject, target_modules=["q_proj"], target_parameters=targets)

    add(f"LoRA with {' and '.join(targets)} as targets", of_experts, which="mixtral")


@edit()
def eva(subject: Subject) -> Outcome:
    """LoRA initialized from the singular vectors of each linear's input."""
    from peft import initialize_lora_eva_weights

    torch.manual_seed(3)
    model = get_peft_model(subject.model, lora(init_lora_weights="eva", eva_config=EvaConfig(rho=1.0)))
    batches = [{"input_ids": subject.input_ids.roll(n, 1), "attention_mask": None} for n in range(4)]
    for batch in batches:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    initialize_lora_eva_weights(model, batches, show_progress_bar=False)
    # The sign of singular vectors is arbitrary: compare the rows of A up to sign.
    starts = {name: value.abs() for name, value in values(model).items() if "lora_A" in name}
    return {"starts": starts, "logits": forward(subject, model)}


@edit()
def lora_ga(subject: Subject) -> Outcome:
    """LoRA initialized from gradients, which PEFT collects with hooks on linears."""
    from peft import LoraGAConfig
    from peft.tuners.lora.loraga import preprocess_loraga

    config = lora(init_lora_weights="lora_ga", lora_ga_config=LoraGAConfig(direction="ArB2r"))
    preprocess_loraga(subject.model, config, lambda: loss_of(subject).backward())
    torch.manual_seed(3)
    model = get_peft_model(subject.model, config)
    return {"logits": forward(subject, model), "trained": trained(subject, model)}


@edit(needs=("attr",))
def corda(subject: Subject) -> Outcome:
    """LoRA initialized from covariances of inputs."""
    from peft.tuners.lora.config import CordaConfig
    from peft.tuners.lora.corda import preprocess_corda

    config = lora(init_lora_weights="corda", corda_config=CordaConfig(corda_method="kpm"))
    # One sequence, because PEFT removes the first dimension.
    run_model = lambda: subject.model(subject.input_ids[:1])  # noqa: E731
    preprocess_corda(subject.model, config, run_model=run_model)
    model = get_peft_model(subject.model, config)
    return {"logits": forward(subject, model), "merged": forward(subject, model.merge_and_unload())}


# Several adapters


def two(subject: Subject) -> PeftModel:
    """Return a model with the adapters `default` and `second` on different linears."""
    model = adapted(subject, lora)
    model.add_adapter("second", lora(target_modules=["k_proj", "gate_proj"], init_lora_weights=False))
    return model


@edit()
def two_adapters_take_turns(subject: Subject) -> Outcome:
    model = two(subject)
    outcome = {"first": forward(subject, model)}
    model.set_adapter("second")
    outcome["second"] = forward(subject, model)
    with model.disable_adapter():
        outcome["none"] = forward(subject, model)
    model.base_model.set_adapter(["default", "second"])
    return {**outcome, "both": forward(subject, model), "trained": trained(subject, model)}


@edit()
def two_adapters_are_made_one(subject: Subject) -> Outcome:
    model = adapted(subject, lora)
    model.add_adapter("second", lora(init_lora_weights=False))
    model.add_weighted_adapter(["default", "second"], [0.7, 0.3], "third", combination_type="linear")
    model.set_adapter("third")
    return {"logits": forward(subject, model), "merged": forward(subject, model.merge_and_unload())}


@edit()
def two_adapters_are_merged_in_sequence(subject: Subject) -> Outcome:
    model = two(subject)
    model.merge_adapter(["default"])
    outcome = {"one": forward(subject, model)}
    model.set_adapter("second")
    model.merge_adapter(["second"])
    return {**outcome, "two": forward(subject, model), "values": values(model.merge_and_unload())}


@edit()
def adapter_is_deleted(subject: Subject) -> Outcome:
    model = two(subject)
    model.delete_adapter("default")
    model.set_adapter("second")
    return {"logits": forward(subject, model), "names": list(model.state_dict())}


@edit()
def each_sample_has_its_adapter(subject: Subject) -> Outcome:
    model = adapted(subject, lora)
    model.add_adapter("second", lora(init_lora_weights=False))
    model.eval()
    with torch.no_grad():
        output = model(subject.input_ids, adapter_names=["default", "second"], use_cache=False)
    return {"logits": output.logits}


@edit()
def merging_makes_sure_of_numbers(subject: Subject) -> Outcome:
    model = adapted(subject, lora)
    model.merge_adapter(safe_merge=True)
    merged = forward(subject, model)
    model.unmerge_adapter()
    return {"merged": merged, "trained": trained(subject, model), "values": values(model)}


# Without a PeftModel


@edit()
def adapter_is_injected(subject: Subject) -> Outcome:
    torch.manual_seed(3)
    inject_adapter_in_model(lora(init_lora_weights=False), subject.model)
    return {**step(subject), "adapter": get_peft_model_state_dict(subject.model)}


@edit()
def adapter_of_transformers(subject: Subject) -> Outcome:
    """`add_adapter` of transformers, saved to a file and loaded by the other library."""
    torch.manual_seed(3)
    subject.model.add_adapter(lora(init_lora_weights=False))
    subject.model.save_pretrained(subject.folder)
    other = subject.other()
    other.load_adapter(str(subject.folder))
    return {"logits": forward(subject), "other": forward(subject, other), "files": stored(subject.folder)}


@edit()
def state_dict_of_adapter_is_set(subject: Subject) -> Outcome:
    model = adapted(subject, lora)
    state = {name: torch.full_like(value, 0.05) for name, value in get_peft_model_state_dict(model).items()}
    set_peft_model_state_dict(model, state)
    return {"logits": forward(subject, model), "names": list(state)}


@edit()
def adapter_in_half_precision(subject: Subject) -> Outcome:
    model = get_peft_model(subject.model, lora(init_lora_weights=False), autocast_adapter_dtype=False)
    torch.manual_seed(3)
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, 0.0, 0.1)
    return {"logits": forward(subject, model), "dtypes": {name: value.dtype for name, value in values(model).items()}}


@edit()
def what_trains(subject: Subject) -> Outcome:
    model = adapted(subject, lambda: lora(modules_to_save=["k_proj"]))
    return {"counts": model.get_nb_trainable_parameters(), "status": sorted(model.get_layer_status()[0].__dict__)}


@edit()
def gradient_checkpointing_with_adapter(subject: Subject) -> Outcome:
    model = adapted(subject, lora)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    model.train()
    loss_of(subject, model).backward()
    return {name: gradient for name, gradient in gradients(model).items() if gradient is not None}


@edit()
def preference_against_disabled_adapter(subject: Subject) -> Outcome:
    """DPO: the reference is the same model without its adapter, in one graph."""
    model = adapted(subject, lora)
    policy = model(subject.input_ids, use_cache=False).logits.log_softmax(-1)
    with torch.no_grad(), model.disable_adapter():
        reference = model(subject.input_ids, use_cache=False).logits.log_softmax(-1)
    (policy - reference).square().mean().backward()
    found = {name: gradient for name, gradient in gradients(model).items() if gradient is not None}
    return {"reference": reference, "gradients": found}


def by_name(wanted: Callable[[str], bool], model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the values with matching names."""
    return {name: value for name, value in values(model).items() if wanted(name)}


@edit()
def lora_plus_and_its_optimizer(subject: Subject) -> Outcome:
    from peft.optimizers import create_loraplus_optimizer

    model = adapted(subject, lora)
    optimizer = create_loraplus_optimizer(model, torch.optim.SGD, lr=0.05, loraplus_lr_ratio=4)
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(subject, model).backward()
        optimizer.step()
    return by_name(lambda name: "lora" in name, model)
