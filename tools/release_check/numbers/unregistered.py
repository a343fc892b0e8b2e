"""Fixtures of `numbers` for classes that nrl_models does not register, with reported regressions.

Some checkpoints belong to another class of the same model, or lack a tensor that the class ties to another one.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from nrl_models.testing.case import randomize
from tools.release_check.numbers.cases import NumberCase, stated, stored_tensors, with_every_value

_T5 = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
_SAM_PART = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_layers": 1}
_CLIP_PART = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


@dataclass(frozen=True)
class Unregistered:
    """A class and its checkpoint.

    Args:
        config: Arguments of its configuration class.
        stored_by: Class whose `save_pretrained` writes the checkpoint.
        copies: Tensors of the file that have the shape of another one, by name.
        dropped: Tensors missing in the file.
        published: Values of `config.json` that the configuration class replaces.
        inputs: Token ids by argument, as `(batch, length)`. Empty if only loading is recorded.
    """

    config: Mapping[str, Any]
    stored_by: str
    copies: Mapping[str, str] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    published: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, tuple[int, int]] = field(default_factory=dict)


CASES: Mapping[str, Unregistered] = {
    # MADLAD-400 stores the embeddings of encoder and decoder, without `shared.weight`.
    "T5ForConditionalGeneration": Unregistered(
        _T5,
        "T5ForConditionalGeneration",
        copies=dict.fromkeys(
            ("lm_head.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight"), "shared.weight"
        ),
        dropped=("shared.weight",),
        published={"tie_word_embeddings": False},
        inputs={"input_ids": (2, 12), "decoder_input_ids": (2, 6), "labels": (2, 6)},
    ),
    "LongT5ForConditionalGeneration": Unregistered(
        _T5 | {"local_radius": 3, "encoder_attention_type": "local"},
        "LongT5ForConditionalGeneration",
        copies={"lm_head.weight": "shared.weight"},
        published={"tie_word_embeddings": False},
        inputs={"input_ids": (2, 12), "decoder_input_ids": (2, 6), "labels": (2, 6)},
    ),
    "CLIPSegModel": Unregistered(
        {
            "text_config": _CLIP_PART | {"vocab_size": 64, "max_position_embeddings": 24, "eos_token_id": 2},
            "vision_config": _CLIP_PART | {"image_size": 32, "patch_size": 16},
            "projection_dim": 16,
            "reduce_dim": 8,
            "decoder_num_attention_heads": 2,
            "extract_layers": [0, 1],
        },
        "CLIPSegForImageSegmentation",
    ),
    "Deimv2Model": Unregistered(
        {
            "encoder_hidden_dim": 32,
            "encoder_ffn_dim": 64,
            "encoder_attention_heads": 2,
            "d_model": 32,
            "decoder_in_channels": [32, 32, 32],
            "decoder_ffn_dim": 64,
            "decoder_layers": 2,
            "decoder_attention_heads": 2,
            "num_queries": 10,
            "lqe_hidden_dim": 16,
        },
        "Deimv2ForObjectDetection",
    ),
    "Sam3Model": Unregistered(
        {
            "text_config": _CLIP_PART | {"vocab_size": 64, "max_position_embeddings": 24, "projection_dim": 32},
            "vision_config": {
                "backbone_config": _CLIP_PART
                | {"model_type": "sam3_vit_model", "image_size": 56, "pretrain_image_size": 28, "window_size": 2}
                | {"global_attn_indexes": [1]},
                "fpn_hidden_size": 32,
                "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
            },
            "geometry_encoder_config": _SAM_PART,
            "detr_encoder_config": _SAM_PART,
            "detr_decoder_config": _SAM_PART | {"num_queries": 10},
            "mask_decoder_config": {"hidden_size": 32, "num_attention_heads": 2},
        },
        "Sam3Model",
    ),
}


def make_case(architecture: str) -> NumberCase:
    """Create the fixture of a class of `CASES` with the installed transformers."""
    case = CASES[architecture]
    model_class, stored_by = (getattr(transformers, name) for name in (architecture, case.stored_by))
    config = model_class.config_class(**case.config)
    torch.manual_seed(0)
    model = stored_by(config)
    randomize(model)
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tensors = stored_tensors(Path(folder))
    tensors |= {name: tensors[source] for name, source in case.copies.items()}
    kept = {name: stated(tensor) for name, tensor in sorted(tensors.items()) if name not in case.dropped}
    inputs = {
        name: stated(torch.arange(3, 3 + rows * length).view(rows, length))
        for name, (rows, length) in case.inputs.items()
    }
    text = {"text": inputs} if inputs else {}
    values = with_every_value(config) | dict(case.published)
    if case.published:  # the published values decide
        values.pop("scale_decoder_outputs", None)
    return NumberCase(architecture, model_class.__module__, values, kept, text, generates=False)
