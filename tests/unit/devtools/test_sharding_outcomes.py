"""What pages say of architectures that were sharding_outcomes, and what the sweep's outcomes are."""

import json
from pathlib import Path

from nrl_models import registry
from nrl_models.devtools import sharding_outcomes
from nrl_models.devtools.sharding_outcomes import Sharded

FILE = Path(__file__).parents[3] / "docs" / "model-coverage" / sharding_outcomes.RESULTS

REFUSAL = """NovaForCausalLM cannot be sharded over tp=2 (1 problem)
  - plan: NovaForCausalLM: has no tensor-parallel plan
  What to do: use fsdp alone"""


def test_verdicts_and_reasons() -> None:
    found = Sharded(
        {"torch": "9"},
        {
            "NovaForCausalLM": {"fsdp": "agrees", "tp": f"refused: {REFUSAL}", "qlora": "limited: no linear"},
            "NovaMoeForCausalLM": {"fsdp": "disagrees: loss", "tp": f"refused: {REFUSAL}", "ep": "error: KeyError: 1"},
        },
    )
    assert found.verdicts("NovaForCausalLM") == {"FSDP2": "yes", "TP": "refused", "EP": "n/a", "QLoRA": "limited"}
    assert found.verdicts("NovaMoeForCausalLM") == {
        "FSDP2": "fails", "TP": "refused", "EP": "fails", "QLoRA": "not tested"
    }  # fmt: skip
    assert set(found.verdicts("Other").values()) == {"not tested"}
    assert found.reasons(["NovaForCausalLM", "NovaMoeForCausalLM", "Other"]) == [
        "TP refused: plan: NovaForCausalLM: has no tensor-parallel plan (NovaForCausalLM, NovaMoeForCausalLM)",
        "QLoRA limited: no linear (NovaForCausalLM)",
        "FSDP2 disagrees: loss (NovaMoeForCausalLM)",
        "EP error: KeyError: 1 (NovaMoeForCausalLM)",
    ]
    summary = found.summary()
    assert "2 architectures were tried, with torch 9" in summary[0]
    assert "- FSDP2: 1 yes, 0 refused, 0 limited, 1 fails" in summary
    assert Sharded().summary() == []


def test_outcomes_are_of_registered_architectures_and_in_known_words() -> None:
    outcomes = json.loads(FILE.read_text())["outcomes"]
    assert outcomes.keys() <= {name for names in registry.FAMILIES.values() for name in names}
    for name, outcome in outcomes.items():
        assert {"fsdp", "tp"} <= outcome.keys() <= sharding_outcomes.FEATURES.keys(), name
        assert {sharding_outcomes.status(one) for one in outcome.values()} <= set(sharding_outcomes.VERDICTS), name
        assert all(one == sharding_outcomes.AGREES or one.partition(": ")[2] for one in outcome.values()), (
            f"{name}: no reason"
        )
