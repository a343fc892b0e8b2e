"""Train with accelerate and FSDP2: sharded by accelerate, or by nrl_models beforehand.

    accelerate launch --num_processes 2 --use_fsdp --fsdp_version 2 \
        --fsdp_auto_wrap_policy TRANSFORMER_BASED_WRAP --fsdp_transformer_layer_cls_to_wrap LlamaDecoderLayer \
        examples/accelerate_fsdp2.py CHECKPOINT OUT

    accelerate launch --num_processes 2 --use_fsdp --fsdp_version 2 --fsdp_auto_wrap_policy NO_WRAP \
        examples/accelerate_fsdp2.py CHECKPOINT OUT --beforehand

With `--beforehand`, each rank reads only its slices of the checkpoint, and accelerate does not change the model.
Without it, every rank loads the model and accelerate shards it. Both keep transformers' parameters, names and files.
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from torch.distributed.device_mesh import init_device_mesh

from nrl_models import AutoModelForCausalLM


def main(arguments: list[str] | None = None) -> list[float]:
    """Train three steps on random tokens and save. Returns the losses of this rank."""
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint")
    parser.add_argument("out")
    parser.add_argument("--beforehand", action="store_true")
    options = parser.parse_args(arguments)
    accelerator = Accelerator()
    mesh = None
    if options.beforehand:
        mesh = init_device_mesh(accelerator.device.type, (accelerator.num_processes,), mesh_dim_names=("fsdp",))
    model = AutoModelForCausalLM.from_pretrained(options.checkpoint, mesh=mesh).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    generator = torch.Generator().manual_seed(accelerator.process_index)
    losses = []
    for _ in range(3):
        tokens = torch.randint(16, model.config.vocab_size, (2, 12), generator=generator).to(accelerator.device)
        loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if options.beforehand:
        model.save_pretrained(options.out)  # call on every rank: gathers file by file
    else:
        state = accelerator.get_state_dict(model)
        if accelerator.is_main_process:
            model.save_pretrained(options.out, state_dict=state)
    accelerator.wait_for_everyone()
    return losses


if __name__ == "__main__":
    print(f"{main()}\n", end="")  # a single write, because ranks share the stream
