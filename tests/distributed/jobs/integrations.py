"""The packages people train with, on sharded models."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from jobs.equality import expected, step, whole_gradients
from jobs.setting import batches, case_of, full, mesh_of, train
from nrl_models import AutoModelForCausalLM
from nrl_models.common.optimizer_state import keep_in_transformers_layout
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
    trainable = [one for one in model.parameters() if one.requires_grad]
    assert trainable
    assert all("lora" in name for name, one in model.named_parameters() if one.requires_grad)
    optimizer = torch.optim.AdamW(trainable, lr=1e-2)
    losses = train(model, optimizer, case_of("LlamaForCausalLM"), range(4))
    assert losses[-1] != losses[0]
    state = peft.get_peft_model_state_dict(model, {name: full(one) for name, one in model.state_dict().items()})
    if dist.get_rank() == 0:
        config.save_pretrained(adapter)
        save_file(
            {f"base_model.model.{name}": one for name, one in state.items()}, f"{adapter}/adapter_model.safetensors"
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


def orthogonalised(matrix: torch.Tensor) -> torch.Tensor:
    """Towards the orthogonal matrix nearest to a gradient, by Newton-Schulz steps, as Muon's (Jordan et al., 2024)."""
    matrix = matrix / matrix.norm()
    for _ in range(5):
        matrix = 1.5 * matrix - 0.5 * matrix @ matrix.T @ matrix
    return matrix


def muon_on_parts(**sizes: int) -> tuple[float, float]:
    """How far updates of parts are from those of the uncombined model's matrices; and those of whole combined ones."""
    case = case_of("LlamaForCausalLM")
    reference = copy.deepcopy(case.reference()).train()
    reference(**batches(case, 1)[0], use_cache=False).loss.backward()
    expected = {name: orthogonalised(one.grad) for name, one in reference.named_parameters() if "_proj" in name}
    model = copy.deepcopy(case.model()).train()
    if sizes:
        parallelize(model, mesh_of(**sizes))
    adapter = model.state_dict_adapter
    model(**batches(case, 1)[0], use_cache=False).loss.backward()
    worst, combined = 0.0, 0.0
    for name, parameter in model.named_parameters():
        gradient = full(parameter.grad)
        parts = [(part, view) for part, view in adapter.parts_of(name) if part in expected]
        for part, view in parts:
            worst = max(worst, float((orthogonalised(view.of(gradient)) - expected[part]).abs().max()))
            if len(parts) > 1:
                together = view.of(orthogonalised(gradient))
                combined = max(combined, float((together - expected[part]).abs().max()))
    return worst, combined


def keeps_states_in_transformers_layout(**sizes: int) -> None:
    """Ask it of a sharded model's optimiser."""
    model = parallelize(copy.deepcopy(case_of("LlamaForCausalLM").model()), mesh_of(**sizes))
    keep_in_transformers_layout(torch.optim.AdamW(model.parameters()), model)


def sharded_example(*arguments: str) -> list[float]:
    """`examples/sharded.py`, in this world's process group."""
    import sharded

    losses = sharded.main(list(arguments))
    torch.compiler.reset()
    return losses
