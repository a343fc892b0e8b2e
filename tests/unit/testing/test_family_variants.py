"""Variants that classes declare: tiny models that stand for published models with other kinds of layers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from config.published_configs import values_of
from test_tiny_rules import features, layer_kinds
from versions import needs, since

from nrl_models import registry
from nrl_models.errors import UnknownArchitectureError
from nrl_models.loading.read_config import read_config
from tools.checkout import PAGES
from tools.coverage_pages.engine_outcomes import certificate_file
from tools.coverage_pages.results import family_of
from tools.mutants.campaign import architectures_in_order
from tools.release_check.subjects import subjects
from tools.release_check.sweep.class_under_test import ClassUnderTest
from tools.variants import SEPARATOR, case_of, split_variant, with_variants

GEMMA4 = ("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration")
UNUSED = ("_name_or_path", "dtype", "default_output_length", "global_head_dim", "vision_soft_tokens_per_image")
"""Published keys that no class of Gemma 4 reads, or that do not change layers."""

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
    assert "EP raises (Gemma4ForCausalLM in its default configuration; see its variants): " in page


@since("5.15")  # older versions do not read all published keys
@pytest.mark.parametrize(
    ("repository", "variant"),
    [
        ("google/gemma-4-E2B-it", "E2B"),
        ("google/gemma-4-E4B-it", "E2B"),
        ("google/gemma-4-26B-A4B", "26B-A4B"),
        ("google/gemma-4-31B-it", "31B"),
    ],
)
def test_gemma4_variants_have_published_features(repository: str, variant: str, tmp_path: Path) -> None:
    """Shared keys and values, experts, soft caps, and towers: no sweep misses a feature of a published size."""
    (tmp_path / "config.json").write_text(json.dumps(values_of(repository)))
    published, tiny = read_config(tmp_path), case_of(f"Gemma4ForConditionalGeneration#{variant}").config
    absent = {path for path, is_set in features(published) - features(tiny) if path.rpartition(".")[2] not in UNUSED}
    # E4B is like E2B, with layers of one width.
    assert absent == ({"text_config.use_double_wide_mlp"} if "E4B" in repository else set())
    assert layer_kinds(published) <= layer_kinds(tiny)
    assert features(case_of(f"Gemma4ForCausalLM#{variant}").config) >= features(tiny.text_config)
