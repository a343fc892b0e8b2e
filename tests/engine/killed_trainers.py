"""Kill trainers during a refit of a server. Run as a script with the server's address and its checkpoint.

Prints a JSON line for each kill: the weights the server uses afterwards, and after another trainer's refit.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from functools import partial

import torch
from transformers import PreTrainedModel

from nrl_models import AutoModelForCausalLM
from nrl_models.engines.hf import HFEngine
from nrl_models.engines.http import HTTPEngine
from nrl_models.engines.transfer.clients import ServerClient
from nrl_models.logprobs import Sampling

TOKENS = [list(range(50, 90))]

STEPS = ("pause", "start_weight_update", "update_weights", "finish_weight_update", "weight_version", "resume")


@torch.no_grad()
def changed(model: PreTrainedModel, first: dict[str, torch.Tensor], seed: int) -> None:
    """Reset the weights, and change one percent of them by several standard deviations."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        parameter.copy_(first[name])
        mask = torch.rand(parameter.shape, generator=generator) < 0.01
        parameter[mask] += 5 * parameter.std() * torch.randn(int(mask.sum()), generator=generator)


def killed(address: str, model: PreTrainedModel, change: Callable[[], None], step: str, when: str, delta: bool) -> int:
    """Refit in a process that is killed before or after a request. Returns the signal that ended it."""
    process = os.fork()
    if process:
        return os.WTERMSIG(os.waitpid(process, 0)[1])
    try:
        engine = HTTPEngine(address)
        if delta:
            engine.refit(model.state_dict_adapter.iter_export(model))
        original = getattr(ServerClient, step)
        calls = 0

        def killing_request(client: ServerClient, *args: object) -> object:
            nonlocal calls
            calls += 1
            if step == "weight_version" and calls == 1:  # the request before any weights are sent
                return original(client, *args)
            if when == "before":
                os.kill(os.getpid(), signal.SIGKILL)
            result = original(client, *args)
            os.kill(os.getpid(), signal.SIGKILL)
            return result

        setattr(ServerClient, step, killing_request)
        change()
        engine.refit(model.state_dict_adapter.iter_export(model))
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def matching_weights(engine: HTTPEngine, expected: dict[str, list[float]]) -> str:
    """Return the name of the expected scores that the server returns, or an empty string."""
    (scores,) = engine.score(TOKENS, Sampling())
    for name, row in expected.items():
        if max(abs(a - b) for a, b in zip(scores[1:], row[1:], strict=True)) < 1e-4:
            return name
    return ""


def main(address: str, checkpoint: str) -> None:
    """Kill a trainer at each step."""
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    first = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    HTTPEngine(address).refit(model.state_dict_adapter.iter_export(model))
    watching = HTTPEngine(address)  # sends no weights, so it accepts any version
    seed = 0
    for delta in (False, True):
        for step in STEPS:
            for when in ("before", "after"):
                if (step, when) == ("weight_version", "after"):
                    continue  # the same as before `resume`
                seed += 1
                trainer = HFEngine(model, "trainer")
                expected = {"old": trainer.score(TOKENS, Sampling())[0]}
                change = partial(changed, model, first, seed)
                ended = killed(address, model, change, step, when, delta)
                change()
                expected["new"] = trainer.score(TOKENS, Sampling())[0]
                watching._client.resume()
                found = matching_weights(watching, expected)
                is_new = STEPS.index(step) > 3 or (step, when) == ("finish_weight_update", "after")
                HTTPEngine(address).refit(model.state_dict_adapter.iter_export(model))
                outcome = {"step": step, "when": when, "delta": delta, "signal": ended, "found": found}
                outcome |= {"expected": "new" if is_new else "old", "next": matching_weights(watching, expected)}
                print(json.dumps(outcome), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
