"""Grouping findings by cause, with stable identifiers."""

from __future__ import annotations

from dataclasses import replace

from tools.release_check.findings import Finding, Kind, Phase, causes_of

RENAMED = Finding(
    Phase.SIGNATURES,
    Kind.RENAMED_PARAMETER,
    "nrl_models.mixin:Fresh.positions",
    "past",
    functions=("transformers.a:A.positions",),
    architectures=("AForImages", "AForText"),
)
EXCEPTION = Finding(
    Phase.SWEEP, Kind.EXCEPTION, "transformers.c:C.forward", "TypeError", ("transformers.c:C.forward",), ("CForText",)
)
DIFFERENCE = Finding(Phase.SWEEP, Kind.DIFFERENCE, "a", "different", architectures=("AForImages",))


def test_findings_with_same_override_share_cause() -> None:
    other = replace(RENAMED, functions=("transformers.b:B.positions",), architectures=("BForImages",))
    (cause,) = causes_of([RENAMED, other])
    assert cause.architectures == ("AForImages", "AForText", "BForImages")
    assert cause.functions == ("transformers.a:A.positions", "transformers.b:B.positions")


def test_difference_joins_the_only_static_cause_of_its_architecture() -> None:
    (cause,) = causes_of([DIFFERENCE, RENAMED])
    assert cause.kind is Kind.RENAMED_PARAMETER
    assert cause.phases == (Phase.SIGNATURES, Phase.SWEEP)


def test_difference_of_other_architecture_is_separate_cause() -> None:
    assert len(causes_of([RENAMED, replace(DIFFERENCE, architectures=("Other",))])) == 2


def test_difference_with_two_static_causes_joins_neither() -> None:
    second = replace(RENAMED, subject="nrl_models.other:Other.forward")
    assert len(causes_of([RENAMED, second, DIFFERENCE])) == 3


def test_exception_joins_the_static_cause_with_its_function() -> None:
    raised = replace(EXCEPTION, functions=RENAMED.functions, architectures=("Unrelated",))
    (cause,) = causes_of([RENAMED, raised])
    assert len(cause.findings) == 2


def test_exceptions_in_the_same_function_are_one_cause() -> None:
    causes = causes_of([EXCEPTION, replace(EXCEPTION, phase=Phase.SUITE), replace(EXCEPTION, detail="ValueError")])
    assert sorted(len(cause.findings) for cause in causes) == [1, 2]


def test_cause_id_does_not_depend_on_findings() -> None:
    one, several = causes_of([EXCEPTION]), causes_of([EXCEPTION, replace(EXCEPTION, item="another")])
    assert one[0].id == several[0].id
    assert one[0].id != causes_of([DIFFERENCE])[0].id


def test_finding_json_round_trip() -> None:
    assert Finding.from_json(RENAMED.to_json()) == RENAMED
