"""Measure memory and traffic of ranks, to compare with `nrl-models plan`."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from jobs.memory import Sent
from jobs.setting import case_of, local, mesh_of
from nrl_models.distributed import Pipeline, parallelize


def measures(architecture: str, batch: int, length: int, **sizes: int) -> dict[str, Any]:
    """Return the bytes this rank holds after a step, the bytes autograd saves in a forward, and the bytes sent."""
    case = case_of(architecture)
    model = parallelize(copy.deepcopy(case.model()).train(), mesh_of(**sizes))
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = case.inputs(batch=batch, length=length)["input_ids"]
    saved_bytes: dict[int, int] = {}
    parameters = {local(parameter).untyped_storage().data_ptr() for parameter in model.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = local(tensor).untyped_storage()
        if storage.data_ptr() not in parameters:
            saved_bytes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with Sent(model.sharding.mesh) as sent:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            logits = model(input_ids=tokens, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, -2), tokens.flatten())
        loss.backward()
    optimizer.step()
    return state_bytes(model, optimizer) | {"activations": sum(saved_bytes.values()), "traffic": sent.nbytes}


def state_bytes(model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """Return the bytes this rank holds after a step."""
    states = [value for state in optimizer.state.values() for value in state.values() if value.ndim > 0]
    return {
        "parameters": sum(local(parameter).nbytes for parameter in model.parameters()),
        "gradients": sum(local(parameter.grad).nbytes for parameter in model.parameters()),
        "optimizer": sum(local(state).nbytes for state in states),
        "buffers": sum(buffer.nbytes for buffer in model.buffers()),
    }


def measures_stages(architecture: str, batch: int, length: int, **sizes: int) -> dict[str, Any]:
    """Measure a pipeline step with one microbatch per rank. "activations" is the peak of saved bytes."""
    case = case_of(architecture)
    model, ranks = parallelize(copy.deepcopy(case.model()).train(), mesh_of(**sizes)), sizes["pp"]
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = case.inputs(batch=batch * ranks, length=length)["input_ids"]
    parameters = {local(parameter).untyped_storage().data_ptr() for parameter in model.parameters()}
    saved_bytes: Counter[int] = Counter()
    nbytes: dict[int, int] = {}
    peak, sent = 0, 0

    class Packed:
        def __init__(self, tensor: torch.Tensor) -> None:
            nonlocal peak
            self.tensor, self.place = tensor, local(tensor).untyped_storage().data_ptr()
            if self.place not in parameters:
                saved_bytes[self.place] += 1
                nbytes[self.place] = local(tensor).untyped_storage().nbytes()
                peak = max(peak, sum(nbytes[place] for place, count in saved_bytes.items() if count))

        def __del__(self) -> None:
            saved_bytes[self.place] -= self.place not in parameters

    class Sending(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal sent
            if func._schema.name == "c10d::send":
                sent += sum(tensor.nbytes for tensor in args[0])
            return func(*args, **(kwargs or {}))

    def loss_of(logits: torch.Tensor, targets: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, -2), targets["tokens"].flatten()) / ranks

    with (
        Sent(model.sharding.mesh) as others,
        Sending(),
        torch.autograd.graph.saved_tensors_hooks(Packed, lambda packed: packed.tensor),
    ):
        Pipeline(model, ranks).step({"input_ids": tokens}, loss_of, {"tokens": tokens})
    optimizer.step()
    traffic = {name: nbytes / ranks for name, nbytes in (others.nbytes | {"pp": sent}).items()}  # per microbatch
    return state_bytes(model, optimizer) | {"activations": peak, "traffic": traffic}
