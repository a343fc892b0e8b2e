"""Tensors of the trainer's model for a capsule: the first diverging block, layer outputs, routing and digests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from nrl_models.common.forward.evaluation import evaluating
from nrl_models.common.forward.routing import RoutingRecord, flip_rate, record_routing
from nrl_models.common.state_dict.merged import export_adapter
from nrl_models.consistency.capsule.capsule_file import Contents
from nrl_models.consistency.capsule.diverging_block import block_name, record_block
from nrl_models.consistency.capsule.module_comparison import ModuleComparison
from nrl_models.consistency.capsule.observations import Observations
from nrl_models.consistency.capsule.replay import ReplayCheck, block_check, compared, measured_or_note
from nrl_models.engines.base import Engine
from nrl_models.engines.digests import tensor_digest
from nrl_models.engines.engine_types import ModuleCall
from nrl_models.engines.hf import HFEngine

DIGESTED_BYTES = 20_000_000_000
"""Digests of all weights are computed up to this size. They are computed at about memory bandwidth."""

BOUNDARY_TOKENS = 64
"""Number of tokens of the outputs of layers."""


def add_block(contents: Contents, model: Any, module: str, tokens: Sequence[int]) -> None:
    """Add the block of a module, with its input, output and weights, or the reason why it is left out.

    Args:
        contents: The capsule.
        model: The trainer's model, without wrappers.
        module: The first module that diverges; empty if it is not known.
        tokens: Token ids of one sequence.
    """
    contents.values |= {"block": None, "block_error": None}
    if not module:
        contents.left_out.append("weights of the first diverging block, because no diverging module is known")
        return
    name = block_name(model, module)
    block, failure = measured_or_note(lambda: record_block(model, name, tokens))
    error, failed = (None, "") if block is None else measured_or_note(block.error)
    if block is None or error is None:
        contents.left_out.append(f"weights of {name}, because it cannot be rebuilt: {failure or failed}")
        return
    if contents.offer(f"weights of {name}, because they are too large", block.tensors()):
        contents.values |= {"block": block.to_json(), "block_error": error}


def add_comparison(contents: Contents, name: str, comparison: ModuleComparison, module: str, block: str) -> None:
    """Add the numbers of a comparison of modules, and as many of its tensors as fit.

    Args:
        contents: The capsule.
        name: Name of the comparison.
        comparison: The comparison.
        module: The first module that diverges; empty if there is none.
        block: The block that it is in.
    """
    retained: set[str] = set()
    tokens = max(
        (len(call.outputs[0].flatten(0, -2)) for call in comparison.expected.values() if call.outputs), default=0
    )
    if module and tokens > contents.limits.tokens:
        contents.left_out.append(f"activations of {tokens:,} tokens, more than the limit of {contents.limits.tokens:,}")
    elif module:
        for module_name, names in zip((module, block), comparison.neighbors(module, block), strict=True):
            if contents.offer(
                f"activations of {module_name}", _call_tensors(name, comparison.keeping(names - retained))
            ):
                retained |= names
    comparison = comparison.keeping(retained)  # as a replay will read it
    calls = {
        key: {
            side: [call.class_name, len(call.inputs), len(call.outputs)]
            for side, call in (("actual", comparison.actual[key]), ("expected", comparison.expected[key]))
        }
        for key in comparison.actual
    }
    contents.values["comparisons"][name] = comparison.to_json() | {"calls": calls}


def read_comparisons(contents: Contents) -> dict[str, ModuleComparison]:
    """Read the comparisons of a capsule, with the numbers of recorded tensors computed again."""
    comparisons = {}
    for name, content in contents.values["comparisons"].items():
        sides: dict[str, dict[str, ModuleCall]] = {"actual": {}, "expected": {}}
        for module, shapes in content["calls"].items():
            for side, (kind, input_count, output_count) in shapes.items():
                sides[side][module] = ModuleCall(
                    kind,
                    tuple(contents.tensors[f"{name}/{side}/{module}/inputs/{index}"] for index in range(input_count)),
                    tuple(contents.tensors[f"{name}/{side}/{module}/outputs/{index}"] for index in range(output_count)),
                )
        comparisons[name] = ModuleComparison.from_json(content, sides["expected"], sides["actual"]).recomputed()
    return comparisons


def comparison_checks(recorded: Mapping[str, Any], observed: Observations) -> list[ReplayCheck]:
    """Compare the errors of modules with the recorded ones."""
    checks = []
    for name, comparison in observed.comparisons.items():
        if comparison.actual:
            before = {key: recorded[name][key] for key in ("pairs", "rounds")}
            again = {key: value for key, value in comparison.to_json().items() if key in before}
            of_all = len(comparison.pairs) or len(comparison.rounds[0].differences)
            detail = f"{len(comparison.actual)} of {of_all} compared again on the {comparison.side}'s activations"
            checks.append(compared("modules", before, again, detail))
    return checks


def _call_tensors(name: str, comparison: ModuleComparison) -> dict[str, torch.Tensor]:
    return {
        f"{name}/{side}/{module}/{direction}/{index}": tensor
        for side, calls in (("expected", comparison.expected), ("actual", comparison.actual))
        for module, call in calls.items()
        for direction, tensors in (("inputs", call.inputs), ("outputs", call.outputs))
        for index, tensor in enumerate(tensors)
    }


def add_observations(contents: Contents, observed: Observations) -> None:
    """Add measurements; their comparisons of modules are added by `add_comparison`."""
    contents.add({f"observed/{name}": tensor for name, tensor in observed.tensors.items()})
    contents.values["observed"] = {"tensors": list(observed.tensors), "values": observed.values}


def read_observations(contents: Contents) -> Observations:
    """Read the measurements of a capsule."""
    recorded = contents.values["observed"]
    return Observations(
        tensors={name: contents.tensors[f"observed/{name}"] for name in recorded["tensors"]},
        values=dict(recorded["values"]),
        comparisons=read_comparisons(contents),
    )


def recomputed(contents: Contents, observed: Observations) -> list[ReplayCheck]:
    """Compare modules, the rebuilt block and routes with the recorded results."""
    checks = [*comparison_checks(contents.values["comparisons"], observed), *block_check(contents)]
    if note := routes_note(contents):
        checks.append(ReplayCheck("routes", True, note))
    return checks


def add_routes(contents: Contents, model: Any, engine: Engine | None, tokens: torch.Tensor) -> None:
    """Add the experts that trainer and engine choose for each token; the engine's only if it runs in this process.

    Args:
        contents: The capsule.
        model: The trainer's model.
        engine: The engine.
        tokens: Token ids, `(batch, seq_len)`.
    """
    contents.values["routes"] = {}
    _add_routes(contents, "trainer", model, tokens)
    if isinstance(engine, HFEngine):
        _add_routes(contents, "engine", engine.model, tokens)


def _add_routes(contents: Contents, side: str, model: Any, tokens: torch.Tensor) -> None:
    """Add the experts that a model chooses for each token; nothing for a model without routers."""

    def recorded() -> RoutingRecord:
        with torch.no_grad(), evaluating(model), record_routing(model) as record:
            model(input_ids=tokens.to(model.device), use_cache=False)
        return record

    record, failure = measured_or_note(recorded)
    if record is None:
        contents.left_out.append(f"routes of the {side}: {failure}")
        return
    routes = {f"routes/{side}/{name}": choices[-1].short() for name, choices in record.items()}
    if routes and contents.offer(f"routes of the {side}", routes):
        contents.values["routes"][side] = list(record)


def routes_note(contents: Contents) -> str:
    """Return how often trainer and engine choose other experts, as text; empty if that is not known."""
    names = contents.values["routes"]
    if "trainer" not in names or "engine" not in names:
        return ""
    sides: list[RoutingRecord] = [
        {name: [contents.tensors[f"routes/{side}/{name}"]] for name in names[side] if name in names["trainer"]}
        for side in ("engine", "trainer")
    ]
    return f"other experts for {flip_rate(*sides):.1%} of tokens in the engine than in the trainer" if sides[0] else ""


def add_layers(contents: Contents, side: str, calls: Mapping[str, ModuleCall]) -> None:
    """Add the outputs of a model's layers, as many as fit."""
    for name, call in calls.items():
        is_layer = name.rpartition(".")[2].isdigit() and sum(part.isdigit() for part in name.split(".")) == 1
        outputs = {f"layers/{side}/{name}/{index}": tensor for index, tensor in enumerate(call.outputs)}
        if is_layer and not contents.offer(f"output of {name} and of later layers of the {side}", outputs):
            return


def add_trainer_layers(contents: Contents, model: Any, tokens: Sequence[int]) -> None:
    """Add the outputs of the layers of the trainer's model on the first tokens of a sequence."""
    calls, failure = measured_or_note(lambda: HFEngine(model, "trainer").module_calls(tokens[:BOUNDARY_TOKENS]))
    if calls is None:
        contents.left_out.append(f"outputs of the trainer's layers: {failure}")
    else:
        add_layers(contents, "trainer", calls)


def weight_digests(model: Any) -> dict[str, str]:
    """Return the digest of each tensor of a model by hub name; empty if they are larger than `DIGESTED_BYTES`."""
    if sum(parameter.nbytes for parameter in model.parameters()) > DIGESTED_BYTES:
        return {}
    return {name: tensor_digest(tensor) for name, tensor in export_adapter(model).iter_export(model)}
