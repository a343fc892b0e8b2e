"""Run the cheap checks of `tools.release_check.sweep` on every registered class, also without generated tests.

`make test` runs the generated suite for one family of each pattern. A change in transformers may break other families:
16 vision-language models once decoded wrong logits after an image, although that selection passed.
"""

from __future__ import annotations

import pytest
import transformers
from packaging.version import Version
from versions import tested_version

from nrl_models import registry
from tools.release_check.sweep.class_checks import run_checks
from tools.release_check.sweep.outcomes import PASSED, REFERENCES_OWN, Check, Outcome, SweepOutcome
from tools.variants import split_variant, with_variants

FEATURES = {
    Check.CACHED_STEPS: ("cached decoding",),
    Check.MEDIA_CACHED_STEPS: ("cached decoding",),
    Check.GREEDY: ("cached decoding", "generate"),
    Check.MEDIA_GREEDY: ("cached decoding", "generate"),
    Check.LEFT_PADDING: ("left padding", "generate"),
}
"""Features of `FamilyModel.limits` that explain why transformers' own class fails a check."""

REFERENCE_FAULTS: dict[tuple[str, Check], str] = {
    ("Dots3NoteForConditionalGeneration", Check.CACHED_STEPS): "rounding decides which blocks of keys are chosen",
    ("GitForCausalLM", Check.MEDIA_CACHED_STEPS): "a step without the image has other positions",
}
"""Other checks that transformers' class and ours fail in the same way, with the reason."""

UNKNOWN_FORMS = {"VibeVoiceAsrForConditionalGeneration": "its forward adds random numbers to audio by default"}
"""Classes whose images or audio `nrl_models.inputs` cannot create, with the reason."""


@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(name, marks=pytest.mark.xdist_group(name))
        for name in with_variants(registry.architectures(aliases=False))
    ],
)
def test_class_matches_reference(architecture: str) -> None:
    outcomes = list(run_checks(architecture))
    if outcomes[0].outcome is Outcome.UNMET:
        pytest.skip(outcomes[0].message)
    if problems := [described(outcome) for outcome in outcomes if not is_expected(outcome)]:
        pytest.fail("\n".join(problems), pytrace=False)


def is_expected(outcome: SweepOutcome) -> bool:
    """Return True if an outcome passes: equal, or a bug of transformers that is listed for the tested version."""
    is_tested_version = Version(transformers.__version__) == tested_version()
    stated = (outcome.architecture, outcome.check) in REFERENCE_FAULTS
    if outcome.outcome in PASSED:
        # A bug that transformers has fixed must be removed here. Otherwise it would hide the next one.
        return not (stated and is_tested_version) or outcome.outcome is Outcome.NOT_APPLICABLE
    if outcome.outcome is Outcome.NO_INPUTS:
        return outcome.architecture in UNKNOWN_FORMS
    if outcome.outcome not in REFERENCES_OWN:
        return False
    limits = getattr(registry.model_class(split_variant(outcome.architecture)[0]), "limits", {})
    return stated or not is_tested_version or any(feature in limits for feature in FEATURES.get(outcome.check, ()))


def described(outcome: SweepOutcome) -> str:
    difference = f", max_diff {outcome.max_diff:.3g}" if outcome.max_diff is not None else ""
    return (
        f"{outcome.check}: {outcome.outcome}{difference} ({outcome.reference}) {outcome.error_type} {outcome.message}"
    )


def test_listed_faults_name_registered_classes() -> None:
    assert {name for name, _ in REFERENCE_FAULTS} | UNKNOWN_FORMS.keys() <= set(registry.architectures(aliases=False))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (Outcome.EQUAL, True),
        (Outcome.DIFFERENT, False),
        (Outcome.RAW_ERROR, False),
        (Outcome.TYPED_ERROR, False),
        (Outcome.CACHE_IGNORED, False),
        (Outcome.NO_INPUTS, False),
        (Outcome.CRASHED, False),
    ],
)
def test_only_equal_outcomes_pass(kind: Outcome, expected: bool) -> None:
    assert is_expected(SweepOutcome("LlamaForCausalLM", Check.CACHED_STEPS, kind)) is expected


@pytest.mark.skipif(Version(transformers.__version__) != tested_version(), reason="faults are stated for one version")
def test_unlisted_transformers_fault_fails() -> None:
    unstated = SweepOutcome("LlamaForCausalLM", Check.CACHED_STEPS, Outcome.REFERENCE_INCONSISTENT)
    assert not is_expected(unstated)
    (name, check), *_ = REFERENCE_FAULTS
    assert is_expected(SweepOutcome(name, check, Outcome.REFERENCE_INCONSISTENT))
    assert not is_expected(SweepOutcome(name, check, Outcome.EQUAL))
