"""Variants that classes declare: tiny models that stand for published models with other kinds of layers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from versions import needs

from nrl_models import registry
from nrl_models.errors import UnknownArchitectureError
from nrl_models.testing.variants import SEPARATOR, case_of, split_variant, with_variants
from tests.engine.coverage_page import certificate_file
from tools.checkout import PAGES
from tools.coverage_pages.results import family_of
from tools.mutants.campaign import architectures_in_order
from tools.release_check.subjects import subjects
from tools.release_check.sweep.class_under_test import ClassUnderTest

GEMMA4 = ("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration")
DECLARED = [name for name in with_variants(registry.architectures(aliases=False)) if SEPARATOR in name]


def test_with_variants_lists_variants_after_class() -> None:
    if registry.unmet_requirement(GEMMA4[0]):
        assert with_variants(GEMMA4) == list(GEMMA4)
        return
    names = with_variants(["LlamaForCausalLM", *GEMMA4])
    assert names[:3] == ["LlamaForCausalLM", "Gemma4ForCausalLM", "Gemma4ForCausalLM#E2B"]
    assert len(names) == 1 + 2 * 4
    assert set(DECLARED) >= set(names) - {"LlamaForCausalLM", *GEMMA4}


@needs(*GEMMA4)
def test_unknown_variant_raises() -> None:
    assert split_variant("Gemma4ForCausalLM") == ("Gemma4ForCausalLM", {})
    with pytest.raises(UnknownArchitectureError, match="no variant 'E9B'; it declares E2B, 26B-A4B, 31B"):
        split_variant("Gemma4ForCausalLM#E9B")
    with pytest.raises(UnknownArchitectureError, match="it declares none"):
        split_variant("LlamaForCausalLM#E2B")


@pytest.mark.long
@pytest.mark.parametrize("name", DECLARED)
def test_variants_have_distinct_tensor_shapes(name: str) -> None:
    def shapes(name: str) -> frozenset[tuple[str, tuple[int, ...]]]:
        state = case_of(name).model().state_dict()
        return frozenset((name, tuple(tensor.shape)) for name, tensor in state.items())

    assert case_of(name, torch.device("meta")).device.type == "meta"
    others = [other for other in with_variants([split_variant(name)[0]]) if other != name]
    assert shapes(name) not in map(shapes, others)


@pytest.mark.parametrize("name", DECLARED)
def test_variant_records_use_family_file(name: str) -> None:
    """Records are in the family's file. A `#` in a file's name would end a link."""
    assert family_of(name) == family_of(split_variant(name)[0])
    assert SEPARATOR not in certificate_file("vLLM", name).name


@pytest.mark.long
@pytest.mark.parametrize("name", DECLARED)
def test_sweeps_run_the_tiny_model_of_each_variant(name: str, tmp_path: Path) -> None:
    assert ClassUnderTest(name, tmp_path).case.tiny == split_variant(name)[1]
    assert name in architectures_in_order()
    assert name in subjects()["families"]


@needs("Gemma4ForCausalLM")
def test_gemma4_page_lists_the_kinds_of_its_variants() -> None:
    page = (PAGES / "gemma4.md").read_text()
    assert "| Gemma4ForCausalLM#26B-A4B | moe |" in page
    assert "| gemma4_text | dense, moe (26B-A4B) |" in page
    assert "expert-parallel plan divides (Gemma4ForCausalLM in its default configuration; see its variants)" in page


@needs("Gemma4ForCausalLM")
def test_gemma4_variants_have_published_layer_types() -> None:
    configs = {name: case_of(f"Gemma4ForCausalLM#{name}").config for name in ("E2B", "26B-A4B", "31B")}
    assert configs["E2B"].num_kv_shared_layers
    assert configs["26B-A4B"].enable_moe_block
    assert configs["26B-A4B"].attention_k_eq_v
    assert configs["31B"].attention_k_eq_v
    assert not configs["31B"].enable_moe_block
