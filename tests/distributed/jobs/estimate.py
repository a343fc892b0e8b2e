"""What ranks hold and send, for `nrl-models plan` to be compared with."""

from __future__ import annotations

import copy
from typing import Any

import torch

from jobs.memory import Sent
from jobs.setting import case_of, local, mesh_of
from nrl_models.distributed import parallelize


def measures(architecture: str, batch: int, length: int, **sizes: int) -> dict[str, Any]:
    """Bytes this rank holds after a step, that autograd keeps in a forward, and that are sent."""
    case = case_of(architecture)
    model = parallelize(copy.deepcopy(case.model()).train(), mesh_of(**sizes))
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = case.inputs(batch=batch, length=length)["input_ids"]
    kept: dict[int, int] = {}
    parameters = {local(parameter).untyped_storage().data_ptr() for parameter in model.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = local(tensor).untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with Sent(model.sharding.mesh) as sent:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            logits = model(input_ids=tokens, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, -2), tokens.flatten())
        loss.backward()
    optimizer.step()
    states = [value for state in optimizer.state.values() for value in state.values() if value.ndim > 0]
    return {
        "parameters": sum(local(parameter).nbytes for parameter in model.parameters()),
        "gradients": sum(local(parameter.grad).nbytes for parameter in model.parameters()),
        "optimizer": sum(local(state).nbytes for state in states),
        "buffers": sum(buffer.nbytes for buffer in model.buffers()),
        "activations": sum(kept.values()),
        "traffic": sent.nbytes,
    }
