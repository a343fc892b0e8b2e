"""Measure the peak memory of loading, exporting, saving, resuming and an RL step, relative to the model's size.

Each measurement runs in a new process. It is the peak of anonymous memory (memory without a file behind it) during the
call, minus its value before the call. "model" is the size of the weights, in the dtype that the call loads, exports or
saves. For resume checkpoints, it is the size of the training state: fp32 weights and AdamW's two states. The baseline
is transformers for loading and saving, `state_dict()` copies for exports, `torch.save` and `torch.load` for resume
checkpoints.

Memory-mapped weights take no anonymous memory until they are modified. The RL step has 8 rollouts of 256 tokens.
Gradients are allocated before the step, so they do not count. The step's weights are in fp32. Its baseline computes
complete logits, one rollout at a time.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.load import MAKE
from benchmarks.reporting import Row, arguments, child, median, publish
from benchmarks.train_step import Peak

OURS, PEER = "nrl_models", "peer"

WHAT = {
    "load": "load, bf16",
    "load_fp32": "load in fp32 from bf16",
    "export": "export every weight",
    "export_buckets": "export in buckets of 256 MB",
    "save": "`save_pretrained`",
    "checkpoint": "`save_checkpoint`",
    "checkpoint_async": "`save_checkpoint(wait=False)`",
    "resume": "`load_checkpoint`",
    "rl_step": "RL step",
}


def measure(who: str, what: str, path: str) -> None:
    """Measure one call in this process. Print peak and size in bytes."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(dir=".") as folder:
        call, size = PREPARED[what](who, path, folder)
        with Peak() as peak:
            kept = call()
        print(json.dumps({"peak": peak.rise, "size": size}), flush=True)
        del kept


def _auto(who: str) -> Any:
    if who == OURS:
        from nrl_models import AutoModelForCausalLM, registry

        for name in ("Llama", "Mixtral"):
            registry.model_class(f"{name}ForCausalLM")
        return AutoModelForCausalLM
    import transformers
    import transformers.models.llama.modeling_llama
    import transformers.models.mixtral.modeling_mixtral

    return transformers.AutoModelForCausalLM


def _nbytes(model: Any) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def _load(who: str, path: str, folder: str, dtype: str = "bfloat16") -> tuple[Callable[[], Any], int]:
    auto = _auto(who)
    size = sum(file.stat().st_size for file in Path(path).glob("*.safetensors"))
    return lambda: auto.from_pretrained(path, dtype=dtype), size * (2 if dtype == "float32" else 1)


def _in_memory(who: str, path: str) -> Any:
    """Load a model, and copy all mapped weights, so that only the measured call takes memory."""
    model = _auto(who).from_pretrained(path)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


def _export(who: str, path: str, folder: str, max_bytes: int | None = None) -> tuple[Callable[[], Any], int]:
    model = _in_memory(who, path)

    def call() -> float:
        if who == OURS:
            tensors = model.state_dict_adapter.iter_export(model, max_bytes=max_bytes)
        else:
            tensors = ((name, tensor.clone()) for name, tensor in model.state_dict().items())
        return sum(float(tensor.reshape(-1)[0]) for _, tensor in tensors)

    return call, _nbytes(model)


def _save(who: str, path: str, folder: str) -> tuple[Callable[[], Any], int]:
    model = _in_memory(who, path)
    return lambda: model.save_pretrained(folder), _nbytes(model)


def _training(who: str, path: str) -> tuple[Any, Any, int]:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from nrl_models.distributed import parallelize

    model = _auto(who).from_pretrained(path, dtype=torch.float32)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
        parameter.grad = torch.zeros_like(parameter)
    if who == OURS:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        parallelize(model, init_device_mesh("cpu", (1,), mesh_dim_names=("fsdp",)))
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    return model, optimizer, _nbytes(model)


def _checkpoint(who: str, path: str, folder: str, *, wait: bool = True) -> tuple[Callable[[], Any], int]:
    import torch

    from nrl_models.distributed import save_checkpoint

    model, optimizer, size = _training(who, path)
    if who == OURS:
        return lambda: save_checkpoint(folder, model, optimizer, {"step": 1}, wait=wait).wait(), 3 * size
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    return lambda: torch.save(state, f"{folder}/state.pt"), 3 * size


def _resume(who: str, path: str, folder: str) -> tuple[Callable[[], Any], int]:
    import torch

    from nrl_models.distributed import load_checkpoint, save_checkpoint

    model, optimizer, size = _training(who, path)
    if who == OURS:
        save_checkpoint(folder, model, optimizer, {"step": 1})
        return lambda: load_checkpoint(folder, model, optimizer), 3 * size
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, f"{folder}/state.pt")

    def load() -> None:
        state = torch.load(f"{folder}/state.pt")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    return load, 3 * size


def _rl_step(who: str, path: str, folder: str) -> tuple[Callable[[], Any], int]:
    import torch

    from nrl_models import rollout_logprobs

    model = _in_memory(who, path).float()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    torch.manual_seed(0)
    tokens = torch.randint(32_000, (8, 256))

    def step() -> None:
        if who == OURS:
            rollout_logprobs(model, list(tokens), loss=lambda found: found.logprobs.nan_to_num().sum())
            return
        for row in tokens:  # one at a time, as TRL
            logits = model(row[None], use_cache=False).logits[:, :-1]
            logits.float().log_softmax(-1).gather(-1, row[None, 1:, None]).sum().backward()

    return step, _nbytes(model)


PREPARED: dict[str, Callable[[str, str, str], tuple[Callable[[], Any], int]]] = {
    "load": _load,
    "load_fp32": lambda who, path, folder: _load(who, path, folder, "float32"),
    "export": _export,
    "export_buckets": lambda who, path, folder: _export(who, path, folder, 2**28),
    "save": _save,
    "checkpoint": _checkpoint,
    "checkpoint_async": lambda who, path, folder: _checkpoint(who, path, folder, wait=False),
    "resume": _resume,
    "rl_step": _rl_step,
}


def main() -> None:
    """Measure, print and save the results."""
    options = arguments(__doc__ or "", runs=1)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(dir=".") as folder:
        for kind in ("dense", "Mixtral"):
            path = str(Path(folder).resolve() / kind)
            size = child(MAKE, kind, path)["bytes"]
            for what, name in WHAT.items():
                code = f"from benchmarks.memory import measure; measure({{!r}}, {what!r}, {path!r})"
                found = {
                    who: [child(code.format(who)) for _ in range(options.runs)]
                    for who in (OURS, PEER)
                }  # fmt: skip
                rows.append(
                    {
                        "call": name,
                        "checkpoint": f"{kind}, {size / 1e9:.2f} GB",
                        "model or state, GB": median(found[OURS], "size") / 1e9,
                        "peak, GB": median(found[OURS], "peak") / 1e9,
                        "peak / model": median(found[OURS], "peak") / median(found[OURS], "size"),
                        "peer's peak / model": median(found[PEER], "peak") / median(found[PEER], "size"),
                    }
                )
    publish("memory", "Peak memory", rows, options.out)


if __name__ == "__main__":
    main()
