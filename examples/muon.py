"""An optimiser on matrices, after Muon (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon/).

    python examples/muon.py CHECKPOINT
    torchrun --nproc-per-node 2 examples/muon.py CHECKPOINT

Muon makes a matrix's update orthogonal. Inside a combined weight are several matrices, and inside a stack of experts
one for each: `parts_of` gives them, so that updates are those of the uncombined model.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from nrl_models import AutoModelForCausalLM
from nrl_models.distributed import share_of


class MatrixSGD(torch.optim.Optimizer):
    """SGD with momentum, whose update of every matrix is orthogonal.

    Args:
        model: combined or not, sharded or not.
        names: of its parameters, such as are made of matrices.
        lr, momentum: as of SGD.
    """

    def __init__(self, model: PreTrainedModel, names: Iterable[str], lr: float = 0.02, momentum: float = 0.95) -> None:
        adapter = model.state_dict_adapter
        parameters = dict(model.named_parameters())
        self.views = {parameters[name]: [view for _, view in adapter.parts_of(name)] for name in names}
        super().__init__(list(self.views), {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """One step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter.grad))
                momentum.mul_(group["momentum"]).add_(parameter.grad)
                whole = momentum.full_tensor() if isinstance(momentum, DTensor) else momentum
                update = torch.empty_like(whole)
                for view in self.views[parameter]:
                    matrix = view.of(whole)
                    scale = max(1.0, matrix.shape[-2] / matrix.shape[-1]) ** 0.5
                    view.of(update).copy_(orthogonal(matrix)).mul_(scale)
                mine = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                mine.sub_(share_of(parameter, update), alpha=group["lr"])


def orthogonal(matrix: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Towards the orthogonal matrix nearest to `matrix` `(..., M, N)`, by Newton-Schulz iterations in fp32."""
    wide = matrix.float() if matrix.shape[-2] <= matrix.shape[-1] else matrix.float().mT
    result = wide / (wide.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        square = result @ result.mT
        result = 3.4445 * result + (-4.7750 * square + 2.0315 * square @ square) @ result
    return (result if matrix.shape[-2] <= matrix.shape[-1] else result.mT).to(matrix.dtype)


def optimizers(model: PreTrainedModel) -> tuple[MatrixSGD, torch.optim.Optimizer]:
    """For the matrices of the layers one of them, for all else AdamW."""
    others = {id(one) for one in (model.get_input_embeddings(), model.get_output_embeddings()) if one is not None}
    vocabulary = {parameter for module in model.modules() if id(module) in others for parameter in module.parameters()}
    matrices = [name for name, one in model.named_parameters() if one.ndim >= 2 and one not in vocabulary]
    rest = [one for name, one in model.named_parameters() if name not in set(matrices)]
    return MatrixSGD(model, matrices), torch.optim.AdamW(rest, lr=1e-3)


def train(model: nn.Module, chosen: Iterable[torch.optim.Optimizer], steps: int) -> list[float]:
    """A few steps on one batch of random tokens. Returns the losses."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, model.config.get_text_config().vocab_size, (2, 32), generator=generator).to(model.device)
    losses: list[float] = []
    for _ in range(steps):
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        for optimizer in chosen:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main(arguments: list[str] | None = None) -> list[float]:
    """Load, sharded under torchrun, and train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint")
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args(arguments)
    where: dict[str, Any] = {}
    if "RANK" in os.environ:
        kind = "cuda" if torch.cuda.is_available() else "cpu"
        dist.init_process_group()
        where["mesh"] = init_device_mesh(kind, (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    model = AutoModelForCausalLM.from_pretrained(options.checkpoint, dtype=torch.float32, **where).train()
    losses = train(model, optimizers(model), options.steps)
    # In one piece: ranks write to one stream.
    print(" ".join(f"{loss:.4f}" for loss in losses) + "\n", end="")
    return losses


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        dist.destroy_process_group()
