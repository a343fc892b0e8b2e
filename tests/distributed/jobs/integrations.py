"""Training packages on sharded models."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from jobs.equality import expected, full_gradients, step
from jobs.setting import batches, case_of, full, mesh_of, subjects_of_error, train
from nrl_models import AutoModelForCausalLM, rollout_logprobs, token_logprobs
from nrl_models.distributed import load_checkpoint, parallelize, save_checkpoint
from nrl_models.distributed.batch_checks import require_same_batch
from nrl_models.distributed.mesh import rank_in, size_of
from nrl_models.errors import ShardingError, StateDictError


def trains_lora(checkpoint: str, adapter: str, **sizes: int) -> list[str]:
    """Train a LoRA adapter on a sharded base model and save it. Returns the names in its file."""
    import peft

    model = AutoModelForCausalLM.from_pretrained(checkpoint).train()
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "up_proj"])
    torch.manual_seed(0)
    peft.inject_adapter_in_model(config, model)
    parallelize(model, mesh_of(**sizes))
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert trainable
    assert all("lora" in name for name, parameter in model.named_parameters() if parameter.requires_grad)
    optimizer = torch.optim.AdamW(trainable, lr=1e-2)
    losses = train(model, optimizer, case_of("LlamaForCausalLM"), range(4))
    assert losses[-1] != losses[0]
    state = peft.get_peft_model_state_dict(model, {name: full(tensor) for name, tensor in model.state_dict().items()})
    if dist.get_rank() == 0:
        config.save_pretrained(adapter)
        save_file(
            {f"base_model.model.{name}": value for name, value in state.items()}, f"{adapter}/adapter_model.safetensors"
        )
    dist.barrier()
    return list(state)


def logprobs_of_adapted_head(checkpoint: str, adapters: dict[str, list[str]], **sizes: int) -> dict[str, float]:
    """Return differences of log-probabilities and gradients to one process, for adapters on the output embedding."""
    import peft

    torch.manual_seed(0)
    config = peft.LoraConfig(**adapters, init_lora_weights=False)
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32), config)
    alone = copy.deepcopy(model)
    parallelize(model.base_model.model, mesh_of(**sizes))
    sequences = [list(range(20, 32)), list(range(40, 49))]
    input_ids = torch.tensor(sequences[0])[None]
    with torch.no_grad():
        wanted = token_logprobs(alone, input_ids, chunk_size=None).logprobs
        together = rollout_logprobs(alone, sequences).logprobs
        differences = {
            "tokens": token_logprobs(model, input_ids, chunk_size=4).logprobs - wanted,
            "rollouts": rollout_logprobs(model, sequences).logprobs - together,
            "reference": token_logprobs(alone, input_ids, reference=model).kl,
        }
    token_logprobs(alone, input_ids, chunk_size=None).logprobs.sum().backward()
    expected_gradients = {name: each.grad for name, each in alone.named_parameters() if each.grad is not None}
    for loss in (None, lambda found: found.logprobs.sum()):
        model.zero_grad()
        if loss is None:
            token_logprobs(model, input_ids, chunk_size=4).logprobs.sum().backward()
        else:
            rollout_logprobs(model, sequences[:1], loss=loss)
        gradients = {name: full(each.grad) for name, each in model.named_parameters() if each.grad is not None}
        assert gradients.keys() == expected_gradients.keys()
        for name, gradient in gradients.items():
            differences[f"{loss is None} {name}"] = gradient - expected_gradients[name]
    return {name: difference.abs().max().item() for name, difference in differences.items()}


def peft_model_resumes(checkpoint: str, folder: str, adapter: str, **sizes: int) -> list[str]:
    """Save a resume checkpoint and the adapter of a sharded `PeftModel`. Returns the parameters that do not resume."""
    import peft

    models = []
    for seed in range(2):
        torch.manual_seed(seed)
        config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"], init_lora_weights=False)
        model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(checkpoint), config)
        parallelize(model.base_model.model, mesh_of(**sizes))
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        models.append((model, torch.optim.AdamW(trained, lr=1e-2)))
    (first, optimizer), second = models
    train(first, optimizer, case_of("LlamaForCausalLM"), range(1))
    save_checkpoint(folder, first, optimizer, {"step": 1})
    assert load_checkpoint(folder, *second) == {"step": 1}
    options = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
    state = get_model_state_dict(first, options=options)  # as in docs/lora.md
    if dist.get_rank() == 0:
        first.save_pretrained(adapter, state_dict=state)
    dist.barrier()
    unsharded = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(checkpoint), adapter)
    others = zip(second[0].parameters(), unsharded.parameters(), strict=True)
    return [
        name
        for (name, parameter), both in zip(first.named_parameters(), others, strict=True)
        if not all(torch.equal(full(parameter), full(other)) for other in both)
    ]


def checkpoints_need_a_sharded_model(folder: str) -> None:
    """Save models that are not sharded, or only in part."""
    import peft

    model = copy.deepcopy(case_of("LlamaForCausalLM").model())
    with pytest.raises(ShardingError, match="LlamaForCausalLM: is not sharded"):
        save_checkpoint(folder, model)
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    prompted = peft.get_peft_model(model, config)
    parallelize(prompted.base_model, mesh_of(fsdp=2))
    with pytest.raises(ShardingError, match=r"prompt_encoder.*is outside the sharded model, base_model"):
        save_checkpoint(folder, prompted)
    averaged = torch.optim.swa_utils.AveragedModel(
        parallelize(copy.deepcopy(case_of("LlamaForCausalLM").model()), mesh_of(tp=2))
    )
    with pytest.raises(StateDictError, match=r"pass the model inside: model\.module"):
        load_checkpoint(folder, averaged)


def later_parameters_raise(folder: str, kind: str, **sizes: int) -> list[tuple[str, ...]]:
    """Add parameters to a sharded model. Returns the parameters named in the error of each later use."""
    import peft

    case, mesh = case_of("LlamaForCausalLM"), mesh_of(**sizes)
    model = parallelize(copy.deepcopy(case.model()).train(), mesh)
    run: Any = model
    if kind == "lora":
        run = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    elif kind == "injected lora":
        peft.inject_adapter_in_model(peft.LoraConfig(r=4, target_modules=["q_proj"]), model)
    elif kind == "head":
        model.lm_head = torch.nn.Linear(model.config.hidden_size, model.config.vocab_size, bias=False)
    else:
        model.value_head = torch.nn.Linear(model.config.hidden_size, 1)
    (batch,) = batches(case, 1)
    uses: list[Callable[[], Any]] = [
        lambda: run(**batch, use_cache=False),
        lambda: model.forward(**batch, use_cache=False),
        lambda: model.model(batch["input_ids"]),
        lambda: model.base_model.forward(batch["input_ids"]),
        lambda: torch.compile(model, backend="eager")(**batch, use_cache=False),
        lambda: save_checkpoint(folder, model),
        lambda: get_model_state_dict(run),
    ]
    if "lora" not in kind:  # for LoRA, these raise another error
        uses += [lambda: model.save_pretrained(folder), lambda: list(model.state_dict_adapter.iter_export(model))]
    return [subjects_of_error(use) for use in uses]


def trained_inputs(kind: str, **sizes: int) -> tuple[str, ...]:
    """Run a sharded model with PEFT's prefix or prompt tuning. Returns the subjects of the error."""
    import peft

    case = case_of("LlamaForCausalLM")
    model: Any = parallelize(copy.deepcopy(case.model()).train(), mesh_of(**sizes))
    config_class = {"prefix": peft.PrefixTuningConfig, "prompt": peft.PromptTuningConfig}[kind]
    model = peft.get_peft_model(model, config_class(num_virtual_tokens=3, task_type="CAUSAL_LM"))
    (batch,) = batches(case, 1)
    with pytest.raises(ShardingError, match="outside the sharded model") as caught:
        model(**batch)
    return tuple(problem.subject for problem in caught.value.problems)


def copied_head_trains(**sizes: int) -> float:
    """Return the gradient difference of a sharded head copied by PEFT (`modules_to_save`), relative to one process."""
    case = case_of("LlamaForCausalLM")
    (batch,) = batches(case, 1)
    head_gradients = []
    for model in (copy.deepcopy(case.model()), parallelize(copy.deepcopy(case.model()), mesh_of(**sizes))):
        trained = copy.deepcopy(model.lm_head)
        model.lm_head = trained
        model.train()(**batch, use_cache=False).loss.backward()
        head_gradients.append(full(trained.weight.grad))
    return float((head_gradients[0] - head_gradients[1]).abs().max())


def batches_must_be_equal(differ: str, **sizes: int) -> tuple[str, ...]:
    """Give each rank another batch. Returns the inputs named in the error."""
    case, mesh = case_of("MixtralForCausalLM"), mesh_of(**sizes)
    model = parallelize(copy.deepcopy(case.model()).train(), mesh)
    batch = batches(case, 1)[0]
    model(**batch, use_cache=False).loss.backward()
    seed = rank_in(mesh, differ)
    if differ == "length":
        other = {name: value[:, : value.shape[1] - dist.get_rank()] for name, value in batch.items()}
    else:
        other = batches(case, seed + 1)[seed]
    try:
        model(**other, use_cache=False).loss.backward()
    except ShardingError as error:
        return tuple(problem.subject for problem in error.problems)
    return ()


def embeddings_must_be_equal(fault: str, **sizes: int) -> tuple[str, ...]:
    """Give each rank embeddings and a mask of floats. Returns the inputs named in the error."""
    case = case_of("MixtralForCausalLM")
    model = parallelize(copy.deepcopy(case.model()).train(), mesh_of(**sizes))
    labels = torch.arange(12).view(2, 6)
    embeddings = torch.randn(2, 6, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    mask = torch.full((2, 1, 6, 6), float("-inf")).triu(1)
    if fault == "order" and dist.get_rank():
        embeddings = embeddings.flip(0)
    if fault == "mask" and dist.get_rank():
        mask[0, 0, 5, 0] = float("-inf")
    images = {
        "size": torch.ones(2),
        "pixels": [torch.ones(3), torch.ones(3) * (dist.get_rank() if fault == "list" else 1)],
    }
    try:
        require_same_batch(model.sharding.mesh, {"images": images})
        model(inputs_embeds=embeddings, attention_mask=mask, labels=labels, use_cache=False).loss.backward()
    except ShardingError as error:
        return tuple(problem.subject for problem in error.problems)
    return ()


def compiled_layers_equal_one_process(architecture: str, **sizes: int) -> dict[str, float]:
    """Run `equals_one_process` with each decoder layer compiled separately."""
    case, mesh = case_of(architecture), mesh_of(**sizes)
    loss, gradients = expected(case, size_of(mesh, "fsdp"))
    model = parallelize(copy.deepcopy(case.model()).train(), mesh)
    graphs: list[Any] = []

    def count(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    for layer in model.model.layers:
        layer.compile(backend=count)
    actual = step(model, case)
    actual_gradients = full_gradients(model)
    torch.compiler.reset()
    worst = max(float((actual_gradients[name] - gradients[name]).abs().max()) for name in gradients)
    return {"loss": abs(actual - loss), "gradients": worst, "graphs": len(graphs)}


def compiled_equals_uncompiled(architecture: str, **sizes: int) -> dict[str, Any]:
    """Return the gradient differences of a model with compiled layers, autograd included, relative to one process."""
    case, mesh = case_of(architecture), mesh_of(**sizes)
    loss, gradients = expected(case, size_of(mesh, "fsdp"))
    model = parallelize(copy.deepcopy(case.model()).train(), mesh)
    torch.compiler.reset()
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")
    actual = step(model, case)
    sharded_gradients = {
        name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    replicas = [_is_same_on_replicas(gradient) for gradient in sharded_gradients.values()]
    actual_gradients = model.state_dict_adapter.to_hf(
        {name: gradient.full_tensor() for name, gradient in sharded_gradients.items()}
    )
    torch.compiler.reset()
    scale = max(float(gradient.abs().max()) for gradient in gradients.values())
    wrong = {
        name: float((actual_gradients[name] - gradient).abs().max()) / scale
        for name, gradient in gradients.items()
        if not float((actual_gradients[name] - gradient).abs().max()) <= 1e-5 * scale
    }
    return {"loss": abs(actual - loss), "wrong": wrong, "replicas differ": replicas.count(False)}


def _is_same_on_replicas(gradient: Any) -> bool:
    """Return True if ranks with the same part of a gradient have the same values, up to rounding."""
    local = gradient.to_local()
    for dim, placement in enumerate(gradient.placements):
        if placement.is_replicate():
            group = gradient.device_mesh.get_group(dim)
            total = local.clone()
            dist.all_reduce(total, group=group)
            mean = total / gradient.device_mesh.size(dim)
            if not torch.allclose(local, mean, rtol=1e-4, atol=1e-5 * float(mean.abs().max() + 1e-6)):
                return False
    return True


def sharded_example(*arguments: str) -> list[float]:
    """Run `examples/sharded.py` in this world's process group."""
    import sharded

    losses = sharded.main(list(arguments))
    torch.compiler.reset()
    return losses
