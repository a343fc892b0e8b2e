"""The packages people train with, on sharded models."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from jobs.equality import expected, step, whole_gradients
from jobs.setting import case_of, full, mesh_of, train
from nrl_models import AutoModelForCausalLM
from nrl_models.distributed import parallelize
from nrl_models.distributed.mesh import size_of


def trains_lora(checkpoint: str, adapter: str, **sizes: int) -> list[str]:
    """Train a LoRA on a sharded base model and save it; the names in its file."""
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


def compiled_layers_equal_one_process(architecture: str, **sizes: int) -> dict[str, float]:
    """As `equals_one_process`, each decoder layer compiled by itself."""
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
    found = whole_gradients(model)
    torch.compiler.reset()
    worst = max(float((found[name] - gradients[name]).abs().max()) for name in gradients)
    return {"loss": abs(actual - loss), "gradients": worst, "graphs": len(graphs)}


def sharded_example(*arguments: str) -> list[float]:
    """`examples/sharded.py`, in this world's process group."""
    import sharded

    losses = sharded.main(list(arguments))
    torch.compiler.reset()
    return losses
