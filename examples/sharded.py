"""Train a model over a mesh with torch alone, stop, and resume over another mesh.

    torchrun --nproc-per-node 4 examples/sharded.py CHECKPOINT OUT --mesh fsdp=2,tp=2 --steps 4
    torchrun --nproc-per-node 2 examples/sharded.py CHECKPOINT OUT --mesh fsdp=2 --steps 8

The second run resumes the first from `OUT/training`. At the end, `OUT/model` is a regular Hugging Face checkpoint.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from nrl_models import AutoModelForCausalLM
from nrl_models.distributed import ParallelPlan, load_checkpoint, parse_mesh, save_checkpoint


def main(arguments: list[str] | None = None) -> list[float]:
    """Train up to step `--steps`. Returns the losses of this run, averaged over all ranks."""
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint")
    parser.add_argument("out", type=Path)
    parser.add_argument("--mesh", default="fsdp=2", help="some of fsdp, ep, tp")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--compile", action="store_true", help="compile each layer")
    parser.add_argument(
        "--bf16", action="store_true", help="compute in bfloat16, keep weights in fp32; needs fsdp in the mesh"
    )
    options = parser.parse_args(arguments)

    device = "cuda" if torch.cuda.is_available() else "cpu"
    if not dist.is_initialized():
        dist.init_process_group()
    if device == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank())
    sizes = parse_mesh(options.mesh)
    mesh = init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))

    # Each rank reads only the slices it holds. No rank ever has the complete model.
    plan = ParallelPlan(param_dtype=torch.bfloat16 if options.bf16 else None, reduce_dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(options.checkpoint, dtype=torch.float32, mesh=mesh, plan=plan).train()
    model.gradient_checkpointing_enable()
    if options.compile:
        for layer in model.model.layers:
            layer.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    step = 0
    if any((options.out / "training").glob("version-*")):
        step = load_checkpoint(options.out / "training", model, optimizer)["step"]

    losses = []
    while step < options.steps:
        loss = model(**batch(model, mesh, step, options.length), use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total := loss.detach().clone())
        losses.append(total.item() / dist.get_world_size())
        step += 1
        if step % options.save_every == 0 and step < options.steps:  # in the background, while training continues
            save_checkpoint(options.out / "training", model, optimizer, {"step": step}, wait=False)
    save_checkpoint(options.out / "training", model, optimizer, {"step": step})

    # An RL trainer does this after each step: stream complete tensors by hub name, in the same order on every rank.
    for _name, _tensor in model.state_dict_adapter.iter_export(model, max_bytes=2**28):
        ...  # the rank that runs the engine's client sends it; the others drop it

    model.save_pretrained(options.out / "model")
    return losses


def batch(model: torch.nn.Module, mesh: dist.DeviceMesh, step: int, length: int) -> dict[str, torch.Tensor]:
    """Return random tokens: different on each rank of `fsdp`, the same on ranks that differ only in `ep` or `tp`."""
    replica = mesh.get_local_rank("fsdp") if "fsdp" in mesh.mesh_dim_names else 0
    generator = torch.Generator().manual_seed(1000 * step + replica)
    tokens = torch.randint(0, model.config.get_text_config().vocab_size, (2, length), generator=generator)
    tokens = tokens.to(model.device)
    return {"input_ids": tokens, "labels": tokens}


if __name__ == "__main__":
    found = main()
    if dist.get_rank() == 0:
        print(" ".join(f"{loss:.4f}" for loss in found))
    dist.destroy_process_group()
