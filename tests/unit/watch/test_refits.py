"""`Watch.refit`: invalid tensors raise the engine's errors. Partial refits and first syncs are not failures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from training_loop import Loop

from nrl_models.consistency.capsule.capsule_file import Contents
from nrl_models.errors import DriftError, EngineError
from nrl_models.watch.drift_capsule import replay_watch
from nrl_models.watch.finding import Cause, Finding
from nrl_models.watch.syncs import DRAFT_SYNCS, Sync, Transfer

NAME, OTHER = "model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"

Tensors = dict[str, torch.Tensor]


def exported(loop: Loop) -> Tensors:
    return {name: tensor.clone() for name, tensor in loop.model.state_dict_adapter.iter_export(loop.model)}


INVALID: dict[str, tuple[Callable[[Tensors], Any], str]] = {
    "dict": (lambda tensors: tensors, "got a dict"),
    "number": (lambda tensors: 3, "got a int"),
    "tensor": (lambda tensors: tensors[NAME], "takes pairs of name and tensor"),
    "names": (lambda tensors: list(tensors), "takes pairs of name and tensor"),
    "no pairs": (lambda tensors: [(NAME,)], "takes pairs of name and tensor"),
    "no tensor": (lambda tensors: [(NAME, [1.0])], "is a list: expected a torch.Tensor"),
    "complex": (lambda tensors: [(NAME, tensors[NAME].to(torch.complex64))], "engines have no complex weights"),
    "meta": (lambda tensors: [(NAME, tensors[NAME].to("meta"))], "is on meta"),
    "sparse": (lambda tensors: [(NAME, tensors[NAME].to_sparse())], "has the layout"),
    "empty": (lambda tensors: [], "a refit without tensors"),
}


@pytest.mark.long
@pytest.mark.parametrize("kind", INVALID)
def test_invalid_tensors_raise_engine_error(kind: str) -> None:
    loop = Loop()
    make, message = INVALID[kind]
    with pytest.raises(EngineError, match=message):
        loop.watch.refit(make(exported(loop)))
    assert loop.watch.version == 0
    assert loop.watch.refit().version == 1


def test_digests_cover_all_tensors() -> None:
    loop = Loop()
    tensors = exported(loop)
    loop.watch.refit(tensors.items())
    assert loop.watch.last_sync.sent == loop.watch.last_sync.arrived
    assert loop.watch.last_sync.sent.keys() == tensors.keys()


def change(loop: Loop, *names: str) -> None:
    with torch.no_grad():
        for name in names:
            loop.model.get_parameter(name).mul_(1.5)


def test_partial_refit_is_not_a_failure() -> None:
    loop = Loop()
    loop.watch.refit()
    change(loop, NAME)
    loop.watch.refit([(NAME, exported(loop)[NAME])], partial=True)
    assert loop.watch.findings == []
    assert loop.watch.last_sync.changed == {NAME}
    change(loop, OTHER)
    loop.watch.refit()
    assert loop.watch.findings == []
    assert loop.watch.last_sync.changed == {OTHER}


def test_first_sync_of_tensor_is_not_a_change() -> None:
    last = Sync(version=0)

    def add(sent: dict[str, str], *, partial: bool = False) -> list[Finding]:
        nonlocal last
        transfer = Transfer(before=last, draft_names=("draft",), sent=sent, learning_rate=0.0, partial=partial)
        last = transfer.after
        return list(transfer.findings())

    assert add({"a": "1", "b": "1"}, partial=True) == []
    assert add({"draft": "1"}, partial=True) == []
    assert last.changed is None
    assert not last.same_weights
    assert add({"a": "1", "b": "1", "draft": "1", "c": "1"}) == []
    assert last.changed is None
    assert add({"a": "1", "b": "1", "draft": "1", "c": "1"}) == []
    assert last.same_weights
    (finding,) = add({"a": "1", "b": "2", "draft": "1", "c": "1", "d": "1"})
    assert finding.cause is Cause.UNEXPECTED_UPDATE
    assert finding.names == ("b",)
    assert last.changed == {"b"}


def test_first_sync_of_draft_is_not_frozen() -> None:
    last, frozen = Sync(version=0), 0
    for step in range(DRAFT_SYNCS + 1):
        sent = {"a": str(step)} | ({"draft": "1"} if step else {})
        options: Any = {"draft_names": ("draft",), "sent": sent, "learning_rate": 1.0, "partial": True}
        transfer = Transfer(before=last, frozen_syncs=frozen, **options)
        assert not list(transfer.findings())
        last, frozen = transfer.after, transfer.frozen_syncs_after
    assert frozen == DRAFT_SYNCS - 1


def test_partial_refit_omitting_changed_tensor_raises(tmp_path: Path) -> None:
    file = tmp_path / "capsule.safetensors"
    loop = Loop(capsule=file)
    loop.watch.refit()
    change(loop, NAME, OTHER)
    with pytest.raises(DriftError) as caught:
        loop.watch.refit([(NAME, exported(loop)[NAME])], partial=True)
    assert "first in model.layers.1.mlp" in str(caught.value)
    assert replay_watch(Contents.read(file)).passed


def test_tensor_changed_during_partial_refit_raises() -> None:
    loop = Loop(probe_every=0)
    loop.watch.refit()
    with pytest.raises(DriftError, match="2 tensors arrived changed"):
        loop.watch.after_sync({NAME: "1", OTHER: "2"}, loop.watch.engine.refit(exported(loop).items()), partial=True)
