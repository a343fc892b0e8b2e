"""Write a version of a resume checkpoint from all ranks, and publish it when all are complete."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import PreTrainedConfig

from nrl_models.common.checkpoint.local_path import CONFIG_NAME, MANIFEST_NAME
from nrl_models.common.checkpoint.publication.locks import locked
from nrl_models.common.checkpoint.writing import reporting_disk
from nrl_models.common.views.view_blocks import Block
from nrl_models.distributed.mesh import Ranks, agreed, gather_over, is_first, reporting_dead_ranks
from nrl_models.distributed.resume_checkpoints.block_files import write_blocks
from nrl_models.distributed.resume_checkpoints.manifest import Manifest, StatePart, WrittenFile
from nrl_models.distributed.resume_checkpoints.saved_versions import next_version, remove_older
from nrl_models.distributed.saving import Attempt, write_together


@dataclass(frozen=True, slots=True)
class VersionContents:
    """Contents of a version, as far as this rank writes them.

    Args:
        blocks: This rank's blocks of each part, with their tensors' names. They are read once, when they are written.
        rank: Index of this rank in the mesh, for file names.
        config: The model's configuration.
        manifest: The manifest without files.
    """

    blocks: Mapping[StatePart, Iterable[tuple[str, Block]]]
    rank: int
    config: PreTrainedConfig
    manifest: Manifest


def write_version(folder: Path, contents: VersionContents, ranks: Ranks) -> Path:
    """Add a version to a folder, and delete older ones.

    Args:
        folder: Directory of the versions.
        contents: Tensors and states of this rank.
        ranks: All ranks that write. Each of them has to call this.

    Returns:
        Directory of the version.

    Raises:
        SaveError: If the disk is full or read-only, or another process saves into the folder.
        ShardingError: If another rank failed. The failed rank raises its own error.
    """
    action = f"save into {folder}"

    def write(stage: Path | None, attempt: Attempt) -> None:
        (path, *_) = gather_over(ranks, None if stage is None else str(stage))
        files: dict[str, WrittenFile] = {}

        def write_own() -> None:
            with reporting_disk(folder):
                for part, blocks in contents.blocks.items():
                    files.update(write_blocks(Path(path), f"{part}-{contents.rank:05d}", blocks))

        attempt(write_own)
        for others in gather_over(ranks, files):
            files |= others
        if stage is not None:
            attempt(_finish, stage, contents.config, replace(contents.manifest, files=files))

    with ExitStack() as stack:
        with agreed(ranks, action), reporting_disk(folder):
            if is_first(ranks):
                folder.mkdir(parents=True, exist_ok=True)
                stack.enter_context(locked(folder))
            version = next_version(folder)
        with reporting_dead_ranks(action):
            (version, *_) = gather_over(ranks, version)
        write_together(version, ranks, write)
        with agreed(ranks, action):
            if is_first(ranks):
                remove_older(version)
    return version


def _finish(stage: Path, config: PreTrainedConfig, manifest: Manifest) -> None:
    config.save_pretrained(stage)
    manifest.files[CONFIG_NAME] = WrittenFile.of(stage / CONFIG_NAME)
    (stage / MANIFEST_NAME).write_bytes(manifest.rendered())
