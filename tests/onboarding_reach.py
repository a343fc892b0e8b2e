"""Onboarding of every decoder in the installed transformers: its combined projections and its status.

`make reach` writes docs/onboarding-reach.md.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import transformers
from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto

from nrl_models import registry
from nrl_models.onboarding.detect import Detection, detect
from tools.checkout import PAGES
from tools.coverage_pages.generated_tests import GeneratedTests, read_generated_tests
from tools.coverage_pages.overview import table
from tools.coverage_pages.results import read_records

MAPPINGS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
)
"""transformers' own lists of text generation classes."""


NOT_REGISTERED: Mapping[str, str] = {
    "BigBirdForCausalLM": "attends in both directions above 704 tokens; one shorter sequence changes its attention "
    "for all later ones",
    "DiffusionGemmaForBlockDiffusion": "denoises blocks of tokens and has no next-token loss",
    "FastVlmForConditionalGeneration": "its vision tower comes from timm; the form of its images is not known",
    "Gemma4AssistantForCausalLM": "drafts for another model and reads that model's hidden states",
    "Gemma4UnifiedAssistantForCausalLM": "drafts for another model and reads that model's hidden states",
    "DbrxForCausalLM": "transformers ignores `attn_config.rope_theta` of published checkpoints",
    "InklingForConditionalGeneration": "needs scipy, which is not a dependency",
    "KyutaiSpeechToTextForConditionalGeneration": "its audio codec cannot be built from a tiny configuration",
    "MllamaForCausalLM": "its cross-attention layers run only with images, which the text model does not take",
    "MoshiForCausalLM": "decodes different logits with a cache",
    "MusicgenForCausalLM": "writes audio codes, one sequence per codebook, not text",
    "MusicgenMelodyForCausalLM": "writes audio codes, one sequence per codebook, not text",
    "Nemotron3_5TranscribeForConditionalGeneration": "transformers does not read back what it saves (`ctc_timestamp`)",
    "PI0ForConditionalGeneration": "writes robot actions and has no vocabulary",
    "PPFormulaNetForConditionalGeneration": "takes an image without text, which the generated tests do not support",
    "PerceptionLMForConditionalGeneration": "its vision tower comes from timm, which has no tiny configuration",
    "Qwen2_5OmniForConditionalGeneration": "has `generate` but no `forward`; load its thinker, which is registered",
    "Qwen3OmniMoeForConditionalGeneration": "has `generate` but no `forward`; load its thinker, which is registered",
    "ReformerModelWithLMHead": "hashes tokens at random in each forward",
    "RwkvForCausalLM": "its output embedding is called `head`, a name that `FamilyModel` uses",
    "T5Gemma2ForConditionalGeneration": "its merged attention projects two inputs with one `k_proj` and one `v_proj`",
    "UdopForConditionalGeneration": "needs a box on the page for each token",
    "XLNetLMHeadModel": "packed documents attend to each other, and it keeps no key-value cache",
    "ZayaForCausalLM": "transformers sets the last of `balancing_biases` to -1 after loading",
}
"""Why a decoder has no family. It loads as transformers' own class, with one warning."""


STATUSES = {
    "green": "registered; the generated tests pass. Features that the family declares as unsupported (`limits`) are "
    "not tested",
    "red": "registered; a generated test fails",
    "not registered": "a tiny model runs, but the class has no family",
    "not run": "a tiny model could not be built, or its forward or backward failed",
}
"""The possible results, and their meanings."""


def decoders() -> Iterator[type[PreTrainedModel]]:
    """Return every class of `MAPPINGS` in the installed transformers, by name."""
    names: set[str] = set()
    for mapping in MAPPINGS:
        for names_or_name in getattr(modeling_auto, mapping, {}).values():
            names.update((names_or_name,) if isinstance(names_or_name, str) else names_or_name)
    for name in sorted(names):
        if (model_class := getattr(transformers, name, None)) is not None:
            yield model_class


def status(detection: Detection, tests: GeneratedTests | None) -> str:
    """Return the status of an architecture: `green`, `red`, `not run` or `not registered`."""
    if detection.architecture in registry.MODEL_ARCH_MAPPING:
        return "red" if tests is None or tests.failed else "green"
    return "not registered" if detection.ok else "not run"


class Row(NamedTuple):
    """The result of one decoder: its architecture, `status`, linears that share an input, and remark."""

    architecture: str
    model_type: str
    status: str
    groups: str
    remark: str


def write_reach(tests: Mapping[str, GeneratedTests], page: Path) -> Counter[str]:
    """Inspect every decoder and write the page.

    Args:
        tests: The recorded outcomes of the generated tests, by architecture.
        page: The Markdown file to write.

    Returns:
        The number of architectures of each `status`.
    """
    rows = []
    for model_class in decoders():
        detection = detect(model_class)
        outcome = status(detection, tests.get(model_class.__name__))
        rows.append(Row(detection.architecture, detection.model_type, outcome, _groups(detection), _remark(detection)))
    page.write_text(as_page(rows, version("transformers")))
    return Counter(row.status for row in rows)


def as_page(rows: Sequence[Row], transformers_version: str) -> str:
    """Return the results as Markdown: counts, then decoders without a family, then remarks on those with one."""
    counts = Counter(row.status for row in rows)
    lines = [
        "<!-- Generated by `make reach`; do not edit. -->",
        "# Onboarding reach",
        "",
        f"Of {len(rows)} text-generating classes of transformers {transformers_version}, {counts['green']} "
        f"({counts['green'] / len(rows):.0%}) are registered and pass",
        "their generated tests. The others load as transformers' classes, with one warning.",
        "",
        "`make reach` builds a tiny model of each class, runs it on text (and images or audio), runs the backward",
        "pass, and traces which linears share an input, so that a family could fuse them. It needs no code for the",
        "class. The text after `images:` or `backward:` is the error of that step.",
        "",
        *table(
            ("status", "classes", "meaning"),
            [(name, str(counts[name]), meaning) for name, meaning in STATUSES.items() if counts[name]],
        ),
    ]
    for name in ("red", "not run", "not registered"):
        if chosen := [row for row in rows if row.status == name]:
            lines += ["", f"## {name.capitalize()}", ""]
            lines += table(
                ("architecture", "reason", "linears to fuse"), [(r.architecture, r.remark, r.groups) for r in chosen]
            )
    if noted := [row for row in rows if row.status == "green" and row.remark]:
        lines += ["", "## Registered, with a remark", ""]
        lines += table(("architecture", "remark"), [(row.architecture, row.remark) for row in noted])
    lines += [
        "",
        "[Model coverage](model-coverage/index.md) lists all registered architectures, with a page for each family.",
    ]
    return "\n".join([*lines, ""])


def _groups(detection: Detection) -> str:
    groups = dict.fromkeys(" + ".join(group) for ones in detection.groups.values() for group in ones)
    return "; ".join(groups).replace("|", "\\|")


def _remark(detection: Detection) -> str:
    seen = f"{detection.step}: {detection.failure}" if detection.step else detection.note
    text = "; ".join(filter(None, [NOT_REGISTERED.get(detection.architecture), seen]))
    text = text if len(text) <= 160 else f"{text[:157]}..."
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    print(dict(write_reach(read_generated_tests(read_records(PAGES)), PAGES.parent / "onboarding-reach.md")))
