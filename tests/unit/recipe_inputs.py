"""A tokenizer for tiny checkpoints, and rows of every kind, for recipes to run on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

TEMPLATE = (
    "{% for message in messages %}{{ message['role'][0] }}{{ message['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}a{% endif %}"
)


def byte_tokenizer(config: Any) -> PreTrainedTokenizerFast:
    """A token for each byte, from 16 on, with a chat template; its end is the model's."""
    text = config.get_text_config()
    end = text.eos_token_id[0] if isinstance(text.eos_token_id, list) else text.eos_token_id
    end = 1 if end is None or end < 0 else end
    words = {letter: 16 + number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    special = {"<pad>": 0, "<end>": end} if end else {"<end>": 0, "<pad>": 2}
    plain = Tokenizer(models.BPE({**special, **words}, []))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<end>", pad_token="<pad>")
    made.chat_template = TEMPLATE
    return made


def save_with_tokenizer(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    byte_tokenizer(model.config).save_pretrained(folder)
    return folder


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
