"""Log that MTP weights are dropped or missing."""

from __future__ import annotations

from collections.abc import Collection

from transformers import PreTrainedModel

from nrl_models.common.checkpoint.files import CheckpointFiles
from nrl_models.common.logs import get_logger
from nrl_models.common.modules import class_name, predicts_words
from nrl_models.common.state_dict.mtp import MTP, MTPNames

logger = get_logger(__name__)


def keeps(model: PreTrainedModel, mtp: MTP) -> bool:
    """Return True if a model keeps MTP weights. They need its output embeddings to predict tokens."""
    return mtp == "keep" and predicts_words(model)


def note_mtp(model: PreTrainedModel, files: CheckpointFiles, mtp_keys: Collection[str], mtp: MTP) -> None:
    """Log once that MTP weights are dropped, or that the configuration declares some but the checkpoint has none.

    Args:
        model, files, mtp: See `fit_checkpoint`.
        mtp_keys: MTP weights in the checkpoint.
    """
    names = MTPNames(model)
    if mtp_keys and not keeps(model, mtp):
        size = sum(files.tensors[key].nbytes for key in mtp_keys) / 1e9
        why = "because of mtp='drop'" if mtp == "drop" else f"because {class_name(model)} has no output embeddings"
        logger.warning_once(
            f"{files.folder}: {len(mtp_keys)} tensors of multi-token prediction ({size:.2f} GB) are dropped, {why}. "
            "Saved and exported checkpoints will not have them."
        )
    elif not mtp_keys and keeps(model, mtp) and names.known and names.announced:
        logger.warning_once(
            f"{files.folder} declares {names.announced} layers of multi-token prediction ({names.key}), but has none. "
            "Saved and exported checkpoints have none either, and engines cannot use them for drafting."
        )
