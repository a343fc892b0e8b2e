"""Places of a forward's tokens in a batch of sequences, for records of the experts that each token uses."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch


@dataclass(frozen=True, slots=True, eq=False)
class TokenPlaces:
    """Places of a forward's tokens in a batch of sequences.

    A record of the batch has the choices of the sequences padded on the right to one length, or of all sequences in one
    row, in their order.

    Attributes:
        index: `(rows, seq_len)` int64, index of each token in the flattened batch `(sequences, longest)`; -1 for
            padding.
        lengths: Number of tokens of each sequence, `(sequences,)` int64 on the CPU. One object for all forwards of a
            batch.
    """

    index: torch.Tensor
    lengths: torch.Tensor

    def taken(self, recorded: torch.Tensor, shape: tuple[int, ...], candidates: int) -> torch.Tensor | None:
        """Return the recorded choices of the forward's tokens, -1 for padding; None if the record does not fit.

        Args:
            recorded: Choices of the batch, `(tokens, ...)` or `(sequences, seq_len, ...)`.
            shape: Shape of the forward's choices.
            candidates: Number of values that each choice is made from.

        Raises:
            ValueError: If the record has choices for padding, but not for all tokens. Then it is padded on the left.
        """
        if len(self.lengths) == 1 and recorded.shape == shape:
            return recorded
        dims = self._dimensions_of_tokens(shape, candidates)
        if dims is None or recorded.ndim < len(shape[dims:]) or recorded.shape[-len(shape[dims:]) :] != shape[dims:]:
            return None
        flat = recorded.reshape(-1, *shape[dims:])
        sequences, longest = len(self.lengths), int(self.lengths.max())
        index, lengths = self.index.flatten().to(flat.device), self.lengths.to(flat.device)
        number, column = index.clamp(min=0) // longest, index.clamp(min=0) % longest
        if len(flat) == int(self.lengths.sum()):
            places = (lengths.cumsum(0) - lengths)[number] + column
        elif len(flat) % sequences == 0 and len(flat) >= sequences * longest:
            width = len(flat) // sequences
            self._require_right_padding(flat.reshape(sequences, width, -1), lengths)
            places = number * width + column
        else:
            return None
        chosen = flat[places]
        chosen[index < 0] = -1
        return chosen.reshape(shape)

    def placed(self, choice: torch.Tensor, candidates: int, earlier: torch.Tensor | None) -> torch.Tensor:
        """Return the choices of the batch padded on the right, with the forward's, and -1 where there are none.

        Args:
            choice: Choices of the forward's tokens. Returned as they are if they are not choices per token.
            candidates: As for `taken`.
            earlier: Result for earlier forwards of the batch, which is updated. None if there is none.
        """
        shape = tuple(choice.shape)
        dims = self._dimensions_of_tokens(shape, candidates)
        if dims is None:
            return choice.clone()
        batch = len(self.lengths), int(self.lengths.max())
        full = (*(batch if dims == 2 else (prod(batch),)), *shape[dims:])
        if earlier is None or earlier.shape != full:
            earlier = choice.new_full(full, -1)
        index = self.index.flatten()
        earlier.view(-1, *shape[dims:])[index[index >= 0]] = choice.reshape(-1, *shape[dims:])[index >= 0]
        return earlier

    def _dimensions_of_tokens(self, shape: tuple[int, ...], candidates: int) -> int | None:
        """Return the number of leading dimensions of a choice that are the forward's tokens; None if none are.

        Also None for choices of keys (`candidates` is the number of columns), because keys have other columns in
        another batch.
        """
        if len(shape) > 2 and shape[:2] == self.index.shape:
            return None if candidates == shape[1] else 2
        return 1 if len(shape) > 1 and shape[0] == self.index.numel() else None

    @staticmethod
    def _require_right_padding(batch: torch.Tensor, lengths: torch.Tensor) -> None:
        """Check that a record `(sequences, seq_len, choices)` does not have choices for padding in place of tokens."""
        padding = torch.arange(batch.shape[1], device=batch.device) >= lengths[:, None]
        if bool((batch[padding] >= 0).any()) and bool((batch[~padding] < 0).any()):
            raise ValueError(
                "the record has choices for padding on the right, and lacks some for tokens: expected the record of "
                "sequences padded on the right (`engine_routing` with left=False)"
            )
