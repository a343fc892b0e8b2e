"""Checks of layers that only some models have: draft layers (multi-token prediction) and routers of experts."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

import torch

from nrl_models.auto import auto_class_for
from nrl_models.certify.certified import CheckpointUnderTest
from nrl_models.certify.check_result import CheckResult, Side, Status
from nrl_models.common.forward.evaluation import evaluating
from nrl_models.common.forward.routing import RoutingRecord, can_replay, replay_routing
from nrl_models.common.state_dict.kept_tensors import kept_by
from nrl_models.common.state_dict.mtp import MTPNames
from nrl_models.engines.transfer.sent_tensors import is_finite
from nrl_models.errors import StateDictError, UnknownArgumentError, listed, one_line
from nrl_models.family import FamilyModel
from nrl_models.inputs.model_inputs import inputs_for
from nrl_models.loading.mtp_layers.mtp_layer import MTPLayer
from nrl_models.onboarding.inspect import ModelKind, kinds_of
from nrl_models.parity.noise import limit, logits_and_routing, logits_noise, logits_of
from nrl_models.parity.parity_report import Unit

DRAFT_TOKENS = 8
"""Number of tokens that a draft layer is run on."""


def draft_layers(subject: CheckpointUnderTest) -> Iterator[CheckResult]:
    """Check that draft layers load, run, and are exported and saved unchanged."""
    name, model = "draft layers", subject.model
    names, draft_tensors = MTPNames(model), kept_by(model, mtp_only=True)
    stored = {key: tensor.read() for key, tensor in draft_tensors.items()}
    if not stored:
        declared = names.announced if names.known else 0
        if declared:
            summary = f"config.json declares {declared} draft layers, and the files have none"
            advice = f"Add their tensors for speculative decoding, or set {names.key} to 0."
            yield CheckResult(name, Status.NOT_DECIDED, summary, compared=0, advice=advice)
        else:
            yield CheckResult(name, Status.NOT_APPLICABLE, "the model has none", compared=0)
        return
    with tempfile.TemporaryDirectory(dir=subject.out) as folder:
        model.save_pretrained(folder)
        again: FamilyModel = auto_class_for(folder).from_pretrained(folder, dtype=torch.float32)
    saved = {key: tensor.read() for key, tensor in kept_by(again, mtp_only=True).items()}
    exported = {key: tensor for key, tensor in model.state_dict_adapter.iter_export(model) if key in stored}
    problems = {
        "not finite": [key for key, tensor in stored.items() if not is_finite(tensor)],
        "all zero": [key for key, tensor in stored.items() if tensor.ndim > 1 and not tensor.any()],
    }
    side = Side.FILES if any(problems.values()) else Side.MODEL
    for where, tensors in {"exported": exported, "saved": saved}.items():
        problems[f"not {where} unchanged"] = [key for key in stored if not _is_equal(tensors.get(key), stored[key])]
    messages = [f"{problem}: {listed(keys)}" for problem, keys in problems.items() if keys]
    if not messages and (error := _cannot_run(again)):
        messages, side = [error], Side.FILES
    yield CheckResult.of(
        name,
        messages,
        f"{len(stored)} tensors load, and are exported and saved unchanged",
        compared=len(stored),
        side=side,
        advice="An engine would draft with these weights: restore them from the published checkpoint.",
    )


def _is_equal(tensor: torch.Tensor | None, expected: torch.Tensor) -> bool:
    return tensor is not None and tensor.dtype == expected.dtype and torch.equal(tensor.cpu(), expected)


def _cannot_run(model: FamilyModel) -> str:
    """Run the draft layer on random tokens. Returns its problem; empty if it runs or cannot be run here.

    Modifies `model`, see `MTPLayer`.
    """
    if model.mtp_form is None:
        return ""
    try:
        layer = MTPLayer(model).eval()
    except StateDictError as error:
        return one_line(error)
    except UnknownArgumentError:  # several layers, or a model with images
        return ""
    ids = inputs_for(model, batch=1, length=DRAFT_TOKENS, images=False)["input_ids"]
    with torch.no_grad(), evaluating(model):
        hidden = model(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states[-1]
        logits = layer(hidden, ids).logits
    return "" if bool(logits.isfinite().all()) else "logits of the draft layer are not finite"


def router_replay(subject: CheckpointUnderTest) -> Iterator[CheckResult]:
    """Check that replaying recorded experts changes nothing, and that replaying others does."""
    name, model = "router replay", subject.model
    if ModelKind.MOE not in kinds_of(subject.config):
        yield CheckResult(name, Status.NOT_APPLICABLE, "the model has no experts")
        return
    if not can_replay(model):
        yield CheckResult(name, Status.NOT_APPLICABLE, f"not supported: {model.limits['router replay']}")
        return
    inputs = inputs_for(model, seed=subject.options.seed)
    with evaluating(model):
        expected, record = logits_and_routing(model, inputs)
        others = {module: [choice.flip(0) for choice in choices] for module, choices in record.items()}
        tokens = sum(choice.shape[:-1].numel() for choices in record.values() for choice in choices)
        if not record or _same_choices(record, others):
            summary = "no choice of experts was recorded" if not record else "all tokens have the same experts"
            yield CheckResult(name, Status.NOT_DECIDED, summary, compared=0)
            return
        with replay_routing(model, record):
            same = (logits_of(model, inputs) - expected).abs().max().item()
        with replay_routing(model, others):
            other = (logits_of(model, inputs) - expected).abs().max().item()
        bound = limit(logits_noise(model, inputs), torch.float32)
    problems = []
    if not same <= bound:
        problems = [f"replaying the recorded experts changes logits by {same:.1e}"]
    elif not other > bound:
        problems = ["replaying other experts changes nothing"]
    yield CheckResult.of(
        name,
        problems,
        f"{tokens:,} choices replayed in {len(record)} layers; logits differ by {same:.1e}",
        value=same,
        bound=bound,
        unit=Unit.MAX_DIFF,
        compared=tokens,
        side=Side.MODEL,
        advice="Train without router replay, or report the model.",
    )


def _same_choices(first: RoutingRecord, second: RoutingRecord) -> bool:
    return all(
        torch.equal(ours.sort(-1).values, theirs.sort(-1).values)
        for name, choices in first.items()
        for ours, theirs in zip(choices, second[name], strict=True)
    )
