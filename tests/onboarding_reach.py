"""How far onboarding reaches: every decoder of the installed transformers, what combines in it, what became of it.

`make reach` writes docs/onboarding-reach.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path

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
"""transformers' own lists of what writes text."""


NOT_REGISTERED: Mapping[str, str] = {
    "BigBirdForCausalLM": "packed documents attend to each other, and it decodes different logits with a cache",
    "DiffusionGemmaForBlockDiffusion": "denoises blocks of tokens and has no next-token loss",
    "FastVlmForConditionalGeneration": "its vision tower comes from timm; the form of its images is not known",
    "Gemma4AssistantForCausalLM": "drafts for another model and reads that model's hidden states",
    "Gemma4UnifiedAssistantForCausalLM": "drafts for another model and reads that model's hidden states",
    "DbrxForCausalLM": "its configuration refuses tied embeddings, which a planted bug needs to be tried",
    "Inkling2LoopForCausalLM": "an empty loop, and a head larger than the vocabulary, fail in our state-dict adapter",
    "Inkling2LoopForConditionalGeneration": "as Inkling2LoopForCausalLM",
    "InklingForConditionalGeneration": "needs scipy, which is not a dependency",
    "KyutaiSpeechToTextForConditionalGeneration": "its audio codec cannot be built from a tiny configuration",
    "MllamaForCausalLM": "its cross-attention layers run only with images, which the text model does not take",
    "MoshiForCausalLM": "decodes different logits with a cache",
    "MusicgenForCausalLM": "writes audio codes, a row for each codebook, not text",
    "MusicgenMelodyForCausalLM": "writes audio codes, a row for each codebook, not text",
    "Nemotron3_5TranscribeForConditionalGeneration": "transformers does not read back what it saves (`ctc_timestamp`)",
    "PI0ForConditionalGeneration": "writes robot actions and has no vocabulary",
    "PPFormulaNetForConditionalGeneration": "takes an image without text; its generated tests were not run",
    "PerceptionLMForConditionalGeneration": "its vision tower comes from timm, which has no tiny configuration",
    "Qwen2_5OmniForConditionalGeneration": "has `generate` but no `forward`; load its thinker, which is registered",
    "Qwen3OmniMoeForConditionalGeneration": "has `generate` but no `forward`; load its thinker, which is registered",
    "ReformerModelWithLMHead": "hashes tokens at random in each forward",
    "RwkvForCausalLM": "its output embedding is called `head`, a name that `FamilyModel` uses",
    "T5Gemma2ForConditionalGeneration": "its merged attention projects two inputs with one `k_proj` and one `v_proj`",
    "UdopForConditionalGeneration": "needs a box on the page for each token",
    "XLNetLMHeadModel": "packed documents attend to each other, and it keeps no key-value cache",
    "ZayaForCausalLM": "transformers sets the last of `balancing_biases` to -1 after it was loaded",
}
"""Why a decoder has no family. It loads as transformers' own class, with one warning."""


def decoders() -> Iterator[type[PreTrainedModel]]:
    """Every class of `MAPPINGS` that the installed transformers has, by name."""
    names: set[str] = set()
    for mapping in MAPPINGS:
        for found in getattr(modeling_auto, mapping, {}).values():
            names.update((found,) if isinstance(found, str) else found)
    for name in sorted(names):
        if (model_class := getattr(transformers, name, None)) is not None:
            yield model_class


def status(found: Detection, tests: GeneratedTests | None) -> str:
    """What became of an architecture: `green`, `red`, `not run` or `not registered`."""
    if found.architecture in registry.MODEL_ARCH_MAPPING:
        return "red" if tests is None or tests.failed else "green"
    return "not registered" if found.ok else "not run"


def write_reach(tests: Mapping[str, GeneratedTests], page: Path) -> Counter[str]:
    """Look at every decoder, and write the table.

    Args:
        tests: what is recorded of the generated tests, by architecture.
        page: the Markdown file to write.

    Returns:
        How many architectures there are of each `status`.
    """
    rows, counts = [], Counter[str]()
    for model_class in decoders():
        found = detect(model_class)
        outcome = status(found, tests.get(model_class.__name__))
        counts[outcome] += 1
        rows.append((found.architecture, found.model_type, outcome, _groups(found), _remark(found)))
    page.write_text(
        "\n".join(
            [
                "<!-- Generated by `make reach`; do not edit. -->",
                "# How far onboarding reaches",
                "",
                f"Every class of transformers {version('transformers')} that writes text: {sum(counts.values())}. Of"
                " each a tiny model is built, run on text (with images and audio), run backwards and traced, without "
                f"a line written for it. {counts['green']} ({counts['green'] / sum(counts.values()):.0%}) are "
                "registered and pass all their generated tests.",
                "",
                *(f"- {outcome}: {count}" for outcome, count in sorted(counts.items())),
                "",
                "`green`: registered, and the generated tests pass (or fail as the family's limits say). `red`: "
                "registered, and a generated test fails. `not registered`: loads as transformers' own class, and the "
                "remark says why it has no family. `not run`: not registered either, and a tiny model could not be "
                "built or run.",
                "",
                *table(("architecture", "model type", "status", "combines", "remark"), rows),
                "",
            ]
        )
    )
    return counts


def _groups(found: Detection) -> str:
    groups = dict.fromkeys(" + ".join(group) for ones in found.groups.values() for group in ones)
    return "; ".join(groups).replace("|", "\\|")


def _remark(found: Detection) -> str:
    seen = f"{found.step}: {found.failure}" if found.step else found.note
    text = "; ".join(filter(None, [NOT_REGISTERED.get(found.architecture), seen]))
    text = text if len(text) <= 160 else f"{text[:157]}..."
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    print(dict(write_reach(read_generated_tests(read_records(PAGES)), PAGES.parent / "onboarding-reach.md")))
