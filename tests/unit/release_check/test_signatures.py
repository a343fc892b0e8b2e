"""Overrides are compared with the signatures of the baseline and of the installed version."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch import nn
from versions import since

from tests.unit.release_check.wheels import sources
from tools.release_check.findings import Kind
from tools.release_check.upstream_code.signatures import (
    _generating_classes,
    changed_parameters,
    missing_fields,
    swallowed_keywords,
)
from tools.release_check.upstream_code.sources import Sources

BASELINE = {
    "transformers/models/planted.py": (
        "class Layer:\n"
        "    def forward(self, x, mask=None, past=None): ...\n"
        "    def moved(self, x, y): ...\n"
        "    def same(self, x): ...\n"
    )
}


def module(name: str, text: str, monkeypatch: pytest.MonkeyPatch, **names: Any) -> ModuleType:
    module_ = ModuleType(name)
    vars(module_).update(names)
    exec(text, vars(module_))
    monkeypatch.setitem(sys.modules, name, module_)
    return module_


@pytest.fixture
def upstream(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    text = (
        "class Layer(nn.Module):\n"
        "    def forward(self, x, mask=None, cache=None): ...\n"
        "    def moved(self, y, x): ...\n"
        "    def same(self, x): ...\n"
    )
    return module("transformers.models.planted", text, monkeypatch, nn=nn)


@pytest.fixture
def baseline(tmp_path: Path) -> Sources:
    return sources(tmp_path, "1.0", BASELINE)


def findings(text: str, upstream: ModuleType, baseline: Sources, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    ours = module("nrl_models.families.planted", text, monkeypatch, Upstream=upstream.Layer)
    return list(changed_parameters({ours.Layer: ["PlantedForCausalLM"]}, baseline))


def test_renamed_parameter(upstream: ModuleType, baseline: Sources, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "class Layer(Upstream):\n    def forward(self, x, *args, past=None, **kwargs): ...\n"
    (finding,) = findings(text, upstream, baseline, monkeypatch)
    assert (finding.kind, finding.detail) == (Kind.RENAMED_PARAMETER, "past")
    assert finding.subject == "nrl_models.families.planted:Layer.forward"
    assert finding.functions == ("transformers.models.planted:Layer.forward",)
    assert finding.architectures == ("PlantedForCausalLM",)


def test_moved_parameter(upstream: ModuleType, baseline: Sources, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "class Layer(Upstream):\n    def moved(self, x, y): ...\n"
    results = findings(text, upstream, baseline, monkeypatch)
    assert {(finding.kind, finding.detail) for finding in results} == {
        (Kind.MOVED_PARAMETER, "x"),
        (Kind.MOVED_PARAMETER, "y"),
    }


@pytest.mark.parametrize(
    "signature",
    ["forward(self, x, *args, **kwargs)", "forward(self, x, mask=None, *, ours=None)", "same(self, x)"],
)
def test_added_parameters_are_not_findings(
    signature: str, upstream: ModuleType, baseline: Sources, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = f"class Layer(Upstream):\n    def {signature}: ...\n"
    assert not findings(text, upstream, baseline, monkeypatch)


def checkout_with(folder: Path, text: str) -> Path:
    (folder / "nrl_models").mkdir()
    (folder / "nrl_models" / "planted.py").write_text(text)
    return folder


def test_missing_output_field(tmp_path: Path) -> None:
    text = (
        "from transformers.modeling_outputs import BaseModelOutput\nBaseModelOutput(last_hidden_state=1, planted=2)\n"
    )
    (finding,) = missing_fields(checkout_with(tmp_path, text), {})
    assert (finding.kind, finding.detail) == (Kind.MISSING_FIELD, "planted")


def test_swallowed_keyword(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One class still takes the old name, another drops it."""
    import transformers

    text = (
        "class Kept:\n    def forward(self, cache=None, **kwargs): ...\n"
        "class Dropped:\n    def forward(self, cache=None, **kwargs): ...\n"
    )
    upstream = module("transformers.models.planted", text, monkeypatch)
    decorated = (
        "    @deprecate_kwarg('past', '9.0', new_name='cache')\n    def forward(self, cache=None, **kwargs): ...\n"
    )
    installed = sources(tmp_path, "2.0", {"transformers/models/planted.py": f"class Kept:\n{decorated}"})
    monkeypatch.setattr("tools.release_check.upstream_code.signatures._generating_classes", lambda: ["Kept", "Dropped"])
    for name in ("Kept", "Dropped"):
        monkeypatch.setattr(transformers, name, getattr(upstream, name), raising=False)
    (finding,) = swallowed_keywords(checkout_with(tmp_path, "model(past=1)\n"), installed)
    assert (finding.kind, finding.subject, finding.detail) == (Kind.SWALLOWED_KEYWORD, "past", "cache")
    assert finding.architectures == ("Dropped",)


@since("5.24")  # older releases do not have all classes
def test_swallowed_keywords_include_audio_models() -> None:
    assert {"LlamaForCausalLM", "Gemma3ForConditionalGeneration", "GlmAsrForConditionalGeneration"} <= {
        *_generating_classes()
    }
