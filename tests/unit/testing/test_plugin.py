"""The plugin, used for an external family: correct families pass, and bugs fail in the expected tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import planted_bugs
import pytest

from nrl_models import registry
from nrl_models.testing.features import SUITE, generated_tests

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("plugin")]  # share the run below

BUGS = {
    "Swapped": {"test_layer_equivalence", "test_logits_equivalence", "test_gradient_equivalence"},
    "Detached": {"test_gradient_equivalence"},
    "Unmasked": {"test_left_padding", "test_packing"},
    "Forgetful": {"test_cached_decode"},
    "Shifted": {"test_layer_equivalence", "test_logits_equivalence", "test_gradient_equivalence"},
    "Undeclared": {"test_declaration_matches_trace"},
    "Unbiased": {
        "test_layer_equivalence",
        "test_logits_equivalence",
        "test_gradient_equivalence",
        "test_cached_decode",  # decoding steps do not use the group
    },
    "Gone": {"test_left_padding"},
    "Crashing": {"test_packing"},
    "Apart": {"test_tied_weights_share_storage"},
}
"""For each family with a bug, the generated tests in `CHECKS` that fail. All others pass."""

RIGHT = ("Nova", "OtherOrder")

CHECKS = sorted({"test_state_dict_roundtrip", "test_full_size_names_and_shapes"}.union(*BUGS.values()))

CONFTEST = """
from nrl_models import register_architecture

def pytest_configure():
    register_architecture("FutureForCausalLM", "planted_bugs:NovaForCausalLM", requires="transformers>=99")
    register_architecture("BrokenForCausalLM", "a_module_that_is_not_there:BrokenForCausalLM")
    register_architecture("RegisteredForCausalLM", "planted_bugs:NovaForCausalLM")
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, list[dict[str, str]]]]:
    """The outcomes of one run by architecture and test, read from the `--nrl-results` file."""
    folder = tmp_path_factory.mktemp("outside")
    (folder / "conftest.py").write_text(CONFTEST)
    families = [f"planted_bugs:{name}ForCausalLM" for name in (*RIGHT, "Lacking", "Unstated", *BUGS, "Buffer")]
    families += ["FutureForCausalLM", "BrokenForCausalLM", "RegisteredForCausalLM"]
    file = folder / "out" / "results.json"
    # Without xdist, and with strict markers, as an external project may be configured.
    options = ["-p", "no:xdist", "-p", "no:cacheprovider", "--strict-markers", "-q", "--nrl-compare"]
    options += ["--nrl-results", str(file)]
    selected = f"({' or '.join(CHECKS)}) and not bfloat16"
    command = [sys.executable, "-m", "pytest", *options, "-k", selected]
    command += [part for name in families for part in ("--nrl-family", name)]
    path = [str(Path(planted_bugs.__file__).parent), *(entry for entry in sys.path if entry)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}  # other processes use the cores
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=250)
    assert run.returncode == pytest.ExitCode.TESTS_FAILED, run.stdout + run.stderr
    content = json.loads(file.read_text())
    assert content["versions"].keys() == {"nrl_models", "torch", "transformers"}
    outcomes: dict[str, dict[str, list[dict[str, str]]]] = defaultdict(lambda: defaultdict(list))
    for result in content["results"]:
        outcomes[result["architecture"]][result["check"].partition("[")[0]].append(result)
    return outcomes


def with_outcome(results: dict[str, list[dict[str, str]]], outcome: str) -> set[str]:
    return {check for check, runs in results.items() if any(run["outcome"] == outcome for run in runs)}


@pytest.mark.parametrize("name", [f"{name}ForCausalLM" for name in RIGHT] + ["RegisteredForCausalLM"])
def test_correct_external_family_passes(name: str, results: dict[str, dict[str, list]]) -> None:
    assert with_outcome(results[name], "failed") == set()
    assert with_outcome(results[name], "passed") == set(CHECKS)


def test_declared_limit_is_reported(results: dict[str, dict[str, list]]) -> None:
    outcomes = results["LackingForCausalLM"]
    assert with_outcome(outcomes, "limited") == {"test_packing"}
    assert {run["reason"] for run in outcomes["test_packing"]} == {"transformers' OPT lets documents see each other"}
    assert with_outcome(outcomes, "passed") == set(CHECKS) - {"test_packing"}


def test_failure_shared_with_transformers_is_marked(results: dict[str, dict[str, list]]) -> None:
    outcomes = results["UnstatedForCausalLM"]
    assert with_outcome(outcomes, "failed") == {"test_packing"}
    assert all(run["upstream"] is True for run in outcomes["test_packing"])
    runs = [run for checks in results.values() for runs in checks.values() for run in runs]
    marked = {(run["architecture"], run["check"].partition("[")[0]) for run in runs if "upstream" in run}
    # transformers' Llama lets documents see each other as well, unlike a rewritten class without a bug.
    assert marked == {("UnstatedForCausalLM", "test_packing"), ("UnmaskedForCausalLM", "test_packing")}


def test_other_errors_are_not_limits(results: dict[str, dict[str, list]]) -> None:
    reasons = {run["reason"] for run in results["CrashingForCausalLM"]["test_packing"]}
    assert reasons == {
        "AssertionError: TypeError: a bug in this class; transformers' class: AssertionError. "
        'The limit stated is "transformers\' OPT lets documents see each other"'
    }
    (run,) = results["GoneForCausalLM"]["test_left_padding"]
    assert "every test of 'left padding' passes: remove that from the family's limits" in run["reason"]


@pytest.mark.parametrize("name", BUGS)
def test_bug_fails_only_expected_tests(name: str, results: dict[str, dict[str, list]]) -> None:
    outcomes = results[f"{name}ForCausalLM"]
    assert with_outcome(outcomes, "failed") == BUGS[name]
    assert with_outcome(outcomes, "passed") >= set(CHECKS) - BUGS[name]


def test_extra_buffer_fails_tests_with_reference_weights(
    results: dict[str, dict[str, list]],
) -> None:
    failed = with_outcome(results["BufferForCausalLM"], "failed")
    assert failed >= {"test_state_dict_roundtrip", "test_full_size_names_and_shapes", "test_logits_equivalence"}


def test_unmet_requirement_skips_with_reason(results: dict[str, dict[str, list]]) -> None:
    outcomes = results["FutureForCausalLM"]
    assert with_outcome(outcomes, "skipped") == set(outcomes)
    reasons = {run["reason"] for runs in outcomes.values() for run in runs}
    assert len(reasons) == 1
    assert "FutureForCausalLM needs transformers>=99; " in reasons.pop()


def test_import_error_fails_only_one_family(results: dict[str, dict[str, list]]) -> None:
    outcomes = results["BrokenForCausalLM"]
    assert set(CHECKS) <= with_outcome(outcomes, "failed") == set(outcomes)


def test_results_include_dtypes(results: dict[str, dict[str, list]]) -> None:
    (run,) = results["NovaForCausalLM"]["test_logits_equivalence"]
    assert run == {
        "architecture": "NovaForCausalLM",
        "check": "test_logits_equivalence[float32]",
        "outcome": "passed",
        "reason": "",
    }
    (run,) = results["ShiftedForCausalLM"]["test_layer_equivalence"]
    assert run["check"] == "test_layer_equivalence[float32]"


# Options. Modules imported first inside these runs would be unloaded afterwards, hence the imports above.


def collected(pytester: pytest.Pytester, *arguments: str, status: pytest.ExitCode = pytest.ExitCode.OK) -> list[str]:
    result = pytester.runpytest_inprocess("--collect-only", "-q", "-p", "no:cacheprovider", *arguments)
    assert result.ret == status
    return [line for line in result.outlines if "::" in line]


def test_family_option_collects_generated_tests(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_own="def test_own(): pass")
    tests = collected(pytester, "--nrl-family", "planted_bugs:NovaForCausalLM")
    names = {line.partition("::")[2].partition("[")[0] for line in tests}
    assert names == set(generated_tests()) - {
        "test_router_replay",
        "test_tokens_choose_different_experts",
        "test_mtp_weights_are_kept",
        "test_images_without_token_types",
    }
    assert all("[NovaForCausalLM" in line for line in tests)


def test_family_is_imported_from_working_directory(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        my_nova="from transformers import LlamaForCausalLM\n"
        "from nrl_models.family import FamilyModel\n"
        "class Nova(FamilyModel):\n    rewrites = {}\n"
        "TunedNova = Nova.head(LlamaForCausalLM)"
    )
    command = [sys.executable, "-P", "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    done = pytester.run(*command, "--nrl-family", "my_nova:TunedNova")
    assert any(line.endswith("test_copies_keep_one_storage[TunedNova]") for line in done.outlines), done.outlines


def test_only_applicable_tests_are_collected(pytester: pytest.Pytester) -> None:
    scorer, mixture = "LlamaForSequenceClassification", "MixtralForCausalLM"
    for name in (scorer, mixture):
        registry.model_class(name)  # otherwise modules imported inside the run would be unloaded afterwards
    tests = collected(pytester, "--nrl-family", scorer, "--nrl-family", mixture)
    names = {
        name: {line.partition("::")[2].partition("[")[0] for line in tests if name in line}
        for name in (scorer, mixture)
    }
    assert names[mixture] == set(generated_tests()) - {
        "test_mtp_weights_are_kept",
        "test_images_without_token_types",
    }
    assert names[mixture] - names[scorer] == {
        "test_base_models_keep_documents_apart",
        "test_cached_decode",
        "test_decoded_steps",
        "test_documents_get_no_gradient_from_each_other",
        "test_embeddings_in_place_of_tokens",
        "test_greedy_generation",
        "test_left_padding",
        "test_packing",
        "test_padded_generation",
        "test_router_replay",
        "test_shared_prompts",
        "test_tied_weights_share_storage",
        "test_tokens_choose_different_experts",
    }
    # Not even a test that is skipped because of an empty parameter set.
    assert (
        collected(pytester, "--nrl-family", scorer, "-k", "test_packing", status=pytest.ExitCode.NO_TESTS_COLLECTED)
        == []
    )


def test_family_option_keeps_test_files_of_project(pytester: pytest.Pytester) -> None:
    test_file = pytester.makepyfile(test_own="def test_own(): pass")
    tests = collected(pytester, str(test_file), "--nrl-family", "planted_bugs:NovaForCausalLM")
    assert tests[0] == "test_own.py::test_own"
    assert len(tests) > 30


def test_without_family_option_no_tests_are_added(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_own="def test_own(): pass")
    assert collected(pytester) == ["test_own.py::test_own"]


def test_suite_collects_every_registered_architecture(pytester: pytest.Pytester) -> None:
    # In a subprocess, because it imports every family.
    command = (sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider")
    done = pytester.run(*command, str(SUITE), "-k", "test_forward_shape")
    collected_names = {line.partition("[")[2].rstrip("]") for line in done.outlines if "::test_forward_shape[" in line}
    assert collected_names == set(registry.architectures()) - set(registry.ALIASES)


def test_invalid_family_names_are_all_explained(pytester: pytest.Pytester) -> None:
    wrong = {
        "Novel": "no family serves that architecture. Register it, or give its class as MODULE:CLASS",
        "LamaForCausalLM": "no family serves that architecture (did you mean LlamaForCausalLM?). Register it",
        "planted_bugs.model:Nova": "there is no module planted_bugs.model on the Python path",
        "planted_bugs:NovaForCausalM": "planted_bugs has no NovaForCausalM",
        "planted_bugs:NOT_A_FAMILY": "expected a class that extends FamilyModel",
    }
    options = [part for name in wrong for part in ("--nrl-family", name)]
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", *options)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    text = result.stdout.str()
    for name, why in wrong.items():
        assert f"--nrl-family {name}: {why}" in text
    assert "Traceback" not in text


def test_plugin_imports_no_heavy_module() -> None:
    # Every pytest run in an environment with this package loads it.
    code = "import sys, nrl_models.testing.plugin; print(*sorted({'torch', 'transformers'} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == ""
