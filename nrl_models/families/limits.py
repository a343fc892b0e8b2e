"""Limits that several families have in common, because transformers' own classes have them.

A limit is a feature of `nrl_models.testing.features` with the reason why a model lacks it.
"""

from collections.abc import Mapping

UPSTREAM_LACKS: Mapping[str, str] = {
    "activation checkpointing": "transformers' own model does not support it",
    "left padding": "transformers' own model gives a sequence other logits when it is padded on the left",
    "right padding": "transformers' own model gives a sequence other logits when it is padded on the right",
    "packed sequences": "in transformers' own model documents in one row see each other, whatever their positions",
    "router replay": "transformers' own model does not use the indices of the `topk` that are replayed",
    "cached decoding": "transformers' own model decodes other logits with a cache than without, or keeps none",
    "batch order": "transformers' own model gives a sequence with an image other logits in another row of the batch",
    "generate": "transformers' own `generate` asks the configuration for a token that it does not have",
    "tensor parallelism": "divided by transformers' plan it is not the model that one process computes",
}
"""Features that some of transformers' classes lack, and how."""


def lacks(*features: str) -> dict[str, str]:
    """The limits of a model of which transformers' own class fails the same tests.

    Args:
        features: of `UPSTREAM_LACKS`, each with `"Architecture: "` before it if it is of one only.
    """
    return {feature: UPSTREAM_LACKS[feature.rpartition(": ")[2]] for feature in features}


LAYOUTS = LEFT, RIGHT, PACKED, CACHED = ("left padding", "right padding", "packed sequences", "cached decoding")
"""Every other way to give a model a sequence than whole and alone."""
NEEDS_IMAGES = dict.fromkeys(LAYOUTS, "transformers' own model takes no text without an image")
"""The limits of a model that describes images: what is proven with text alone is not proven of it."""
READS_APART = dict.fromkeys(LAYOUTS, "an encoder reads the prompt, and the decoder writes another sequence")
"""The limits of a model with an encoder: what is proven of one sequence, read and written, does not apply."""

STATE_GOES_ON = {PACKED: "upstream's gated delta nets carry their state from a document to the next"}
"""The limits of Qwen3.5."""
