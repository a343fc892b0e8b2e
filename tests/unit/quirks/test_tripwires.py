"""Tripwires check that upstream still has each bug. They fail when a fix arrives, and name the code to delete.

Tripwires of vLLM are in `tests/engine`.
"""

from __future__ import annotations

from typing import Any

import pytest
from quirk_probes import OF_CLASS, OF_INSTALLED
from quirk_tripwires import tripwire

from nrl_models import families, registry
from nrl_models.families.gemma4.variants import E2B
from nrl_models.families.table import TABLE
from nrl_models.quirks import CATALOG, Quirk
from nrl_models.testing.case import FamilyCase
from tools.coverage_pages.quirk_pages import class_subject

TINY: dict[str, dict[str, Any]] = {
    "Gemma4ForCausalLM": E2B,
    "Gemma4ForConditionalGeneration": {"text_config": E2B},
}
"""Settings of tiny configurations that show quirks of certain sizes."""

OF_EVERY_MODEL = "LlamaForCausalLM"
"""The architecture used for quirks of every model."""

ROWS = {name: entry.architectures for name, entry in TABLE.items() if entry.mixins}
ARCHITECTURES = [
    name
    for names in ({name: facts.architectures for name, facts in families.folders().items()} | ROWS).values()
    for name in names
    if not name.endswith("Classification") and not registry.unmet_requirement(name)
]
"""Families with a separate folder, and table rows that rewrite more than projections."""


@pytest.mark.parametrize("quirk", CATALOG, ids=lambda quirk: quirk.name)
def test_installed_packages_still_have_quirk(quirk: Quirk) -> None:
    tripwire(quirk, OF_INSTALLED[quirk.name]() if quirk.name in OF_INSTALLED else None, "what is installed")


@pytest.mark.long
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_transformers_class_still_has_quirk(architecture: str) -> None:
    model_class = registry.model_class(architecture)
    subject = class_subject(model_class)
    case = FamilyCase(model_class, tiny=TINY.get(architecture, {}))
    for quirk in CATALOG:
        is_probed = quirk.name in OF_CLASS and (not quirk.every_model or architecture == OF_EVERY_MODEL)
        if is_probed and quirk.applies(subject):
            tripwire(quirk, OF_CLASS[quirk.name](case), architecture)
