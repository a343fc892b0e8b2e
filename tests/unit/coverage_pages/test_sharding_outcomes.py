"""Recording outcomes of sharded architectures, and their text on the pages."""

import pytest

from nrl_models import registry
from tools.checkout import PAGES
from tools.coverage_pages import sharding_outcomes
from tools.coverage_pages.results import Kind, Record, Records, all_versions, read_records, versions_summary
from tools.coverage_pages.sharding_outcomes import ShardingOutcome, Status
from tools.variants import with_variants

NAMES = ("NovaForCausalLM", "NovaMoeForCausalLM", "Other")
REFUSAL = "plan: NovaForCausalLM: has no tensor-parallel plan"


def records(outcomes: dict[Kind, dict[str, ShardingOutcome]]) -> Records:
    return {
        kind: {name: outcome.recorded_with({"torch": "9"}) for name, outcome in outcomes.get(kind, {}).items()}
        for kind in Kind
    }


def test_verdicts_and_reasons() -> None:
    agrees, refused = ShardingOutcome(Status.AGREES), ShardingOutcome(Status.REFUSED, REFUSAL)
    recorded = records(
        {
            Kind.FSDP: {"NovaForCausalLM": agrees, "NovaMoeForCausalLM": ShardingOutcome(Status.DISAGREES, "loss")},
            Kind.TP: {"NovaForCausalLM": refused, "NovaMoeForCausalLM": refused},
            Kind.EP: {"NovaMoeForCausalLM": ShardingOutcome(Status.ERROR, "KeyError: 1")},
            Kind.PP: {"NovaMoeForCausalLM": agrees},
            Kind.QLORA: {"NovaForCausalLM": ShardingOutcome(Status.LIMITED, "no linear")},
        }
    )
    assert sharding_outcomes.verdicts(recorded, "NovaForCausalLM") == {
        "FSDP2": "yes", "TP": "raises", "EP": "n/a", "compiled experts": "n/a", "PP": "n/a", "QLoRA": "limited"
    }  # fmt: skip
    assert sharding_outcomes.verdicts(recorded, "NovaMoeForCausalLM") == {
        "FSDP2": "fails", "TP": "raises", "EP": "fails", "compiled experts": "n/a", "PP": "yes", "QLoRA": "not tested"
    }  # fmt: skip
    assert set(sharding_outcomes.verdicts(recorded, "Other").values()) == {"not tested"}
    assert sharding_outcomes.reasons(recorded, ["NovaForCausalLM", "NovaMoeForCausalLM", "Other"]) == [
        "TP raises (NovaForCausalLM, NovaMoeForCausalLM): `plan: NovaForCausalLM: has no tensor-parallel plan`",
        "QLoRA limited (NovaForCausalLM): `no linear`",
        "FSDP2 disagrees (NovaMoeForCausalLM): `loss`",
        "EP error (NovaMoeForCausalLM): `KeyError: 1`",
    ]
    row = next(line for line in sharding_outcomes.summary(recorded, NAMES) if line.startswith("| FSDP2 |"))
    assert row.startswith("| FSDP2 | 1 | 0 | 0 | 1 | 1 | 0 | loads on two processes")
    assert sharding_outcomes.summary(records({}), NAMES) == []


def test_versions_of_several_runs() -> None:
    recorded = records({Kind.TP: {name: ShardingOutcome(Status.AGREES) for name in "abc"}})
    recorded[Kind.TP]["b"] = Record({"torch": "8"}, recorded[Kind.TP]["b"].outcome)
    (row,) = [line for line in sharding_outcomes.summary(recorded, "abc") if line.startswith("| TP |")]
    assert row.startswith("| TP | 3 | 0 | 0 | 0 | 0 | 0 |")
    assert versions_summary(recorded[Kind.TP]) == "torch 9 (2 architectures) and torch 8 (1 architectures)"
    assert all_versions(recorded[Kind.TP].values()) == "torch 8 and 9"


@pytest.mark.usefixtures("every_family")
def test_every_other_outcome_has_a_reason() -> None:
    recorded = read_records(PAGES)
    registered = set(with_variants(registry.architectures(aliases=False)))
    for kind in sharding_outcomes.FEATURES:
        assert recorded[kind].keys() <= registered
        for name, record in recorded[kind].items():
            outcome = ShardingOutcome.of(record)
            assert (outcome.status == Status.AGREES) != bool(outcome.reason), f"{name}, {kind}: {outcome}"
    assert recorded[Kind.FSDP].keys() == recorded[Kind.TP].keys()
