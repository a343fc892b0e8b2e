"""A tokenizer for tiny checkpoints, and rows of every kind to run recipes on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast, ProcessorMixin

TEMPLATE = (
    "{% for message in messages %}{{ message['role'][0] }}{{ message['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)


def byte_tokenizer(config: Any, named: Mapping[str, int] = {}) -> PreTrainedTokenizerFast:
    """Create a tokenizer with one token per byte, from id 16, a chat template, and the special tokens `named`."""
    text = config.get_text_config()
    end = text.eos_token_id[0] if isinstance(text.eos_token_id, list) else text.eos_token_id
    end = 1 if end is None or end < 0 else end
    words = {letter: 16 + number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    special = {"<pad>": 0, "<end>": end} if end else {"<end>": 0, "<pad>": 2}
    plain = Tokenizer(models.BPE({**special, **words, **named}, []))
    plain.add_special_tokens(list(named))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<end>", pad_token="<pad>")
    made.chat_template = TEMPLATE
    return made


IMAGE_TEMPLATE = (
    "{% for message in messages %}{{ message['role'][0] }}{% for part in message['content'] %}"
    "{{ '<image>' if part['type'] == 'image' else part['text'] }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)


def gemma4_processor(config: Any) -> ProcessorMixin:
    """Create a processor for a tiny Gemma 4: bytes, and images of 64 tokens (if they are square)."""
    from transformers import Gemma4ImageProcessor, Gemma4Processor, Gemma4VideoProcessor
    from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor

    kinds = ("image", "boi", "eoi", "audio", "boa", "eoa", "video")
    ids = {kind: getattr(config, f"{kind}_token_id", None) or getattr(config, f"{kind}_token_index") for kind in kinds}
    names = {kind: "<|video|>" if kind == "video" else f"<{kind}>" for kind in kinds}
    tokenizer = byte_tokenizer(config, {names[kind]: ids[kind] for kind in kinds})
    for kind in kinds[:-1]:
        tokenizer._set_model_specific_special_tokens({f"{kind}_token": names[kind]})
    sizes = {"patch_size": config.vision_config.patch_size, "max_soft_tokens": 70}
    return Gemma4Processor(
        Gemma4AudioFeatureExtractor(),
        Gemma4ImageProcessor(**sizes),
        tokenizer,
        Gemma4VideoProcessor(**sizes),
        chat_template=IMAGE_TEMPLATE,
    )


def save_with_tokenizer(model: PreTrainedModel, folder: Path, *, images: bool = False) -> Path:
    model.save_pretrained(folder)
    (gemma4_processor if images else byte_tokenizer)(model.config).save_pretrained(folder)
    return folder


def rows_with_images(folder: Path) -> Path:
    """Write a file of rows with one image each, in different colors. The first image is wide."""
    rows = []
    for number, row in enumerate(ROWS):
        image = Image.new("RGB", (48 if number else 96, 48), (25 * number, 255 - 25 * number, 90))
        image.save(folder / f"{number}.png")
        rows.append({**row, "problem": f"<image>{row['problem']}", "images": [f"{number}.png"]})
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


ROWS: list[dict[str, Any]] = [
    {
        "question": f"{number} + 1?",
        "problem": f"{number} + 1?",
        "answer": f"#### {number + 1}",
        "prompt": f"{number} + 1?",
        "completion": "x" * (number % 4) + str(number + 1),  # of several lengths
        "messages": [
            {"role": "user", "content": f"{number} + 1?"},
            {"role": "assistant", "content": str(number + 1)},
        ],
        "chosen": [{"role": "user", "content": f"{number} + 1?"}, {"role": "assistant", "content": str(number + 1)}],
        "rejected": [{"role": "user", "content": f"{number} + 1?"}, {"role": "assistant", "content": "no"}],
    }
    for number in range(3, 12)
]
