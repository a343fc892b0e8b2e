"""Limits shared by several families, because transformers' own classes have them.

A limit is a feature of `nrl_models.testing.features` with the reason why a model lacks it.
"""

from collections.abc import Mapping

UPSTREAM_LACKS: Mapping[str, str] = {
    "activation checkpointing": "transformers' class does not support it",
    "left padding": "transformers' class returns different logits for a left-padded sequence",
    "right padding": "transformers' class returns different logits for a right-padded sequence",
    "packed sequences": "in transformers' class packed documents attend to each other, whatever their positions",
    "cached decoding": "transformers' class decodes different logits with a cache, or keeps no cache",
    "batch order": "transformers' class returns different logits for a sequence with an image elsewhere in the batch",
    "generate": "transformers' `generate` needs a token that the configuration lacks",
    "tensor parallelism": "sharded by transformers' plan it differs from the unsharded model",
}
"""Faults of some transformers classes, by feature."""


def lacks(*features: str) -> dict[str, str]:
    """Return limits that transformers' class also has, so that it fails the same tests.

    Args:
        features: Keys of `UPSTREAM_LACKS`, with the prefix `"Architecture: "` for a single architecture.
    """
    return {feature: UPSTREAM_LACKS[feature.rpartition(": ")[2]] for feature in features}


LAYOUTS = LEFT, RIGHT, PACKED, CACHED = ("left padding", "right padding", "packed sequences", "cached decoding")
"""All sequence layouts except a single unpadded sequence."""
NEEDS_IMAGES = dict.fromkeys(LAYOUTS, "transformers' class does not run on text without an image")
"""For models that describe images: the text-only tests do not apply."""
NEEDS_AUDIO = dict.fromkeys(LAYOUTS, "transformers' class does not run on text without audio")
"""For models that hear a stretch of audio with each token: the text-only tests do not apply."""
READS_APART = dict.fromkeys(LAYOUTS, "the encoder reads the prompt and the decoder writes a separate sequence")
"""For encoder-decoder models: tests with a single sequence, read and continued, do not apply."""
SHARED_PROMPTS = "shared prompts"
"""Feature of `rollout_logprobs`: completions attend to a prompt that is once in their row."""
COUNTS_COLUMNS = {SHARED_PROMPTS: "attention scores depend on the distance in the row, not between positions"}
CHOOSES_KEYS = {SHARED_PROMPTS: "the order in the row decides which keys of equal score the indexer chooses"}
OTHER_MASKS = {SHARED_PROMPTS: "its masks have parts that count columns of the row, not positions"}
LOOKS_AHEAD = {"log-probabilities": "attends in both directions, because transformers' class makes every token context"}
"""Functions that score tokens raise `HeadError`."""
