"""Old public names still work, and name their replacement."""

from __future__ import annotations

import copy
import importlib

import pytest

from nrl_models import registry
from nrl_models.losses import Normalize, loss_named
from nrl_models.testing.case import FamilyCase


@pytest.mark.parametrize(
    ("module", "old", "new"),
    [
        ("nrl_models.losses", "Normalise", "Normalize"),
        ("nrl_models.losses", "Level", "RatioLevel"),
        ("nrl_models.watch", "Level", "Severity"),
        ("nrl_models.parity", "localise", "localize"),
        ("nrl_models.quirks", "CATALOGUE", "CATALOG"),
    ],
)
def test_renamed_object_warns_and_resolves(module: str, old: str, new: str) -> None:
    package = importlib.import_module(module)
    with pytest.deprecated_call(match=f"{module}.{old} was renamed to {module}.{new}"):
        assert getattr(package, old) is getattr(package, new)
    with pytest.raises(AttributeError, match="nonsense"):
        package.nonsense  # noqa: B018


def test_renamed_loss_keyword_warns() -> None:
    with pytest.deprecated_call(match="normalise= was renamed to normalize="):
        loss = loss_named("grpo", normalise="token")
    assert loss == loss_named("grpo", normalize=Normalize.TOKEN)


@pytest.mark.parametrize(("old", "new"), [("own", "specs"), ("kept", "mtp")])
def test_renamed_attribute_warns(old: str, new: str) -> None:
    adapter = FamilyCase(registry.model_class("LlamaForCausalLM")).model().state_dict_adapter
    with pytest.deprecated_call(match=rf"\.{old} was renamed to \w+\.{new}"):
        assert getattr(adapter, old) is getattr(adapter, new)
    adapter = copy.copy(adapter)
    with pytest.deprecated_call(match=rf"\.{old} was renamed to \w+\.{new}"):
        setattr(adapter, old, {})
    assert getattr(adapter, new) == {}
