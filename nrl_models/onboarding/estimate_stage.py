"""What the stage of one rank takes in a step of a pipeline, from one micro-batch of it on meta.

The schedule is the one that meshes get unasked, 1F1B: a rank runs as many micro-batches forward as there are ranks from
it to the last, and from then on one backward for each. A step has the fewest micro-batches that this takes: one for
each rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from transformers import PreTrainedModel

from nrl_models.distributed.mesh import rank_in, size_of
from nrl_models.distributed.pipeline.shared import held_by_several
from nrl_models.distributed.sharding import sharding_of
from nrl_models.distributed.shards import local_of


@dataclass(frozen=True)
class OneStage:
    """A rank's stage.

    Args:
        model: on meta, with that stage.
        tokens: of a micro-batch, `(sequences, length)`.
    """

    model: PreTrainedModel
    tokens: torch.Tensor

    def __post_init__(self) -> None:
        sharding = sharding_of(self.model)
        assert sharding.stages is not None
        sharding.stages.running = rank_in(sharding.mesh, "pp")

    @property
    def rank(self) -> int:
        """Of `pp`."""
        return rank_in(sharding_of(self.model).mesh, "pp")

    @property
    def ranks(self) -> int:
        """Of `pp`, all of them; and micro-batches of a step."""
        return size_of(sharding_of(self.model).mesh, "pp")

    @property
    def is_last(self) -> bool:
        """Whether it computes logits."""
        return self.rank == self.ranks - 1

    @cached_property
    def received(self) -> torch.Tensor:
        """Hidden states of a micro-batch, of which the first stage takes the tokens."""
        stages = sharding_of(self.model).stages
        assert stages is not None
        shape = *self.tokens.shape, *stages.cut.crossing.features
        return torch.zeros(shape, dtype=stages.cut.crossing.dtype, device="meta", requires_grad=True)

    def run(self) -> torch.Tensor:
        """What the stage sends; of the last the logits."""
        return self.model(self.received, input_ids=self.tokens)

    def kept(self, nbytes: int) -> int:
        """Bytes between forward and backward, of which one micro-batch keeps `nbytes`.

        torch keeps what a stage sends until the backward, and allocates what it receives once for every micro-batch of
        a step: hidden states of all but the first stage, their gradients of all but the last.
        """
        running = self.ranks - self.rank
        hidden = self.ranks * (self.rank > 0) + (self.ranks + running) * (not self.is_last)
        return running * nbytes + hidden * self.received.nbytes

    @property
    def sent(self) -> int:
        """Bytes that a rank sends for a micro-batch, and once a step for gradients of what several ranks hold."""
        shared, replicas = 0, size_of(sharding_of(self.model).mesh, "fsdp")
        for parameter, ranks in held_by_several(self.model):
            shared += local_of(parameter).nbytes // replicas * (len(ranks) - 1 if self.rank == ranks[0] else 1)
        return ((self.rank > 0) + (not self.is_last)) * self.received.nbytes + shared
