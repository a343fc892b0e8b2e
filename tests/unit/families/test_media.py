"""Every registered architecture is tested with all its input modalities. Otherwise its towers would be untested."""

from __future__ import annotations

import inspect

from nrl_models.onboarding.detect import MEDIA
from nrl_models.testing.case import FamilyCase


def test_family_inputs_include_all_modalities(family_case: FamilyCase) -> None:
    forward, inputs = inspect.signature(family_case.reference_class.forward).parameters, family_case.inputs()
    takes = {kind: [name for name in names if name in forward] for kind, names in MEDIA.items()}
    missing = [kind for kind, names in takes.items() if names and not any(name in inputs for name in names)]
    assert not missing, f"no {' and no '.join(missing)} in {sorted(inputs)}: see nrl_models/parity/{missing[0]}.py"
