"""Compare refits of a running vLLM, by each transport, with vLLM's own reload of the same weights.

The model has the shape of SmolLM2-135M in bf16, and random weights. Three engines run at once: vLLM in this process, in
a subprocess, and as a server over HTTP with shared memory. In each round, every method runs once. Two sets of weights,
which differ in all elements, alternate. Exceptions: `unchanged` sends the same weights again, and `1 %` changes one
element in a hundred.

The baselines are one copy of the weights into allocated memory, and vLLM's `reload_weights` in this process, from
tensors in memory or from safetensors files in the page cache. By default, a refit compares digests of the sent and the
received tensors. In a subprocess and over HTTP, a refit takes longer because the weights are first copied into shared
memory and hashed on both sides, and only then loaded by vLLM. Seconds are medians, and ratios are medians of the ratios
of each round, so a ratio can differ from the quotient of two medians. The null ratio compares the reload from memory
with itself: each measurement with the next one. Without noise, it would be 1. It belongs to the whole run, so all rows
have the same.

Run it in vLLM's environment: `.venv-engine/bin/python -m benchmarks.refit_engine`. Waiting threads do not spin
(`OMP_WAIT_POLICY=PASSIVE`, as `nrl-models` sets it). If they did, the waiting threads of one engine would slow down the
other engines on two cores.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # torch reads it at import

import torch
from transformers import LlamaConfig

from benchmarks.reporting import Row, arguments, median_ratio, null_ratio, publish
from nrl_models import AutoModelForCausalLM, start_engine
from nrl_models.engines import Engine
from nrl_models.family import FamilyModel

CONFIG = LlamaConfig(
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    vocab_size=49_152,
    tie_word_embeddings=True,
    architectures=["LlamaForCausalLM"],
)
"""135 million parameters: 269 MB in bfloat16."""

RELOAD = "vLLM `reload_weights`, from memory"
LIMITS: dict[str, Any] = {"dtype": torch.bfloat16, "max_length": 128}


def main() -> None:
    """Measure, print and save the results."""
    options = arguments(__doc__ or "", runs=5)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    with tempfile.TemporaryDirectory() as name, ExitStack() as running:
        folder = Path(name)
        models = [_saved(folder / str(number), seed=number) for number in range(2)]
        publish("refit_engine", "Refits of vLLM", _measured(models, folder, running, options.runs), options.out)


def _saved(folder: Path, seed: int) -> FamilyModel:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIG, dtype=torch.bfloat16, device="cpu")
    model.save_pretrained(folder)
    return model


def _measured(models: list[FamilyModel], folder: Path, running: ExitStack, runs: int) -> list[Row]:
    from tests.engine.one_server import serving

    path = folder / "0"
    inside: Any = running.enter_context(start_engine("vllm", path, **LIMITS))
    process = running.enter_context(start_engine("vllm", path, multiprocessing=True, **LIMITS))
    backend = (
        "--weight-transfer-config",
        json.dumps({"backend": "nrl_models"}),
        "--dtype",
        "bfloat16",
        "--skip-tokenizer-init",
    )
    settings = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_LOGGING_LEVEL": "ERROR"}
    server = running.enter_context(serving(path, folder / "log", *backend, settings=settings))
    http = running.enter_context(start_engine(server.address, path))

    source, target = (torch.ones(sum(p.nbytes for p in models[0].parameters()), dtype=torch.uint8) for _ in range(2))
    ways: dict[str, Callable[[int], object]] = {
        "one copy": lambda turn: target.copy_(source),
        RELOAD: lambda turn: _reload(inside, weights_iterator=iter(_exported(models[turn]))),
        "vLLM `reload_weights`, from files": lambda turn: _reload(inside, weights_path=str(folder / str(turn))),
        "in process": lambda turn: _refit(inside, models[turn]),
        "in process, without digests": lambda turn: _refit(inside, models[turn], digests=False),
        "subprocess": lambda turn: _refit(process, models[turn]),
        "HTTP, all changed": lambda turn: _refit(http, models[turn]),
        "HTTP, unchanged": lambda turn: _refit(http, models[turn]),
        "HTTP, 1 % changed": lambda turn: _refit(http, models[turn]),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for run in range(runs + 1):  # the first warms up
        for name, way in ways.items():
            turn = run % 2
            if name == "HTTP, 1 % changed":
                _change(models[turn])
            started = time.perf_counter()
            way(turn)
            if run:
                seconds[name].append(time.perf_counter() - started)
    return [
        {
            "way": name,
            "MB": source.nbytes / 1e6,
            "seconds": median(found),
            "time / copy": median_ratio(found, seconds["one copy"]),
            "time / vLLM's reload": median_ratio(found, seconds[RELOAD]),
            "null ratio": null_ratio(seconds[RELOAD]),
        }
        for name, found in seconds.items()
    ]


def _exported(model: FamilyModel) -> Iterator[tuple[str, torch.Tensor]]:
    return iter(model.state_dict_adapter.iter_export(model))


def _refit(engine: Engine, model: FamilyModel, **options: bool) -> None:
    engine.refit(_exported(model), **options)


def _reload(engine: Any, **options: Any) -> None:
    engine.llm.collective_rpc("reload_weights", kwargs=options)


@torch.no_grad()
def _change(model: FamilyModel) -> None:
    """Change one element in a hundred of each weight."""
    for parameter in model.parameters():
        parameter.view(-1)[::100] *= -1


if __name__ == "__main__":
    main()
