"""Create prompts of a given length: sections of real text, and counting numbers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nrl_models.consistency import Data
from nrl_models.consistency.cells import Cell
from nrl_models.errors import ConsistencyError
from nrl_models.inputs.model_inputs import first_text_token
from nrl_models.inputs.real_text import prose_of_this_machine
from nrl_models.inputs.tokenizers import load_tokenizer


class Prompts:
    """Creates prompts for a checkpoint.

    Args:
        tokenizer: The checkpoint's tokenizer. Without it, dummy prompts are counting token ids, and real text is not
            available.
        vocabulary: Number of rows of the model's embedding.
        text: Real text. None uses Python's reference manual.

    A tokenizer may have more tokens than the embedding has rows if they are not used. For example, Gemma 3's
    tokenizer has an image token that the text model lacks.
    """

    def __init__(self, tokenizer: Any | None, vocabulary: int, text: str | None = None) -> None:
        self.tokenizer, self.vocabulary = tokenizer, vocabulary
        self._text = text
        self._ids: list[int] | None = None

    @classmethod
    def of_checkpoint(cls, path: str | Path, vocabulary: int, text_file: Path | None = None) -> Prompts:
        """Create prompts for the checkpoint in `path`, with its tokenizer if it has one.

        Raises:
            ConsistencyError: If the text cannot be read, or the tokenizer does not load.
        """
        try:
            text = None if text_file is None else text_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConsistencyError(f"cannot read the text in {text_file}: {error}") from error
        return cls(load_tokenizer(path), vocabulary, text)

    def make(self, cell: Cell, length: int, seed: int) -> list[list[int]]:
        """Create one prompt for each sequence of a cell's batch.

        Args:
            cell: The cell, which defines the data and the number of prompts.
            length: Number of tokens of each prompt.
            seed: Random seed of the start in the text or of the first number.

        Raises:
            ConsistencyError: If real text is requested without a tokenizer, or is too short. Also if the tokenizer
                returns ids without a row in the embedding, or no more tokens for longer texts.
        """
        generator = random.Random(f"{seed} {cell.data} {length}")
        make = self._real if cell.data == Data.REAL else self._dummy
        return [make(length, generator) for _ in range(cell.batch)]

    def counting(self, count: int) -> list[int]:
        """Return a text that counts from 1 to `count`, as token ids; without a tokenizer, counting token ids."""
        if self.tokenizer is None:
            return self._counting_ids(0, count)
        return [*self._start(), *self._encode(" ".join(map(str, range(1, count + 1))) + " ")]

    def text(self, tokens: Sequence[int]) -> str:
        """Decode token ids; without a tokenizer, return them as numbers."""
        return " ".join(map(str, tokens)) if self.tokenizer is None else self.tokenizer.decode(list(tokens))

    def _real(self, length: int, generator: random.Random) -> list[int]:
        if self.tokenizer is None:
            raise ConsistencyError(
                "the checkpoint has no tokenizer, which real data needs: add its tokenizer to the directory, or check "
                "dummy data only (--data dummy)"
            )
        if self._ids is None:
            self._ids = self._encode(prose_of_this_machine() if self._text is None else self._text)
        ids, start = self._ids, self._start()
        size = length - len(start)
        if len(ids) < size:
            raise ConsistencyError(f"the text has {len(ids):,} tokens, but a prompt needs {size:,}: use a longer text")
        offset = generator.randrange(len(ids) - size + 1)
        return [*start, *ids[offset : offset + size]]

    def _dummy(self, length: int, generator: random.Random) -> list[int]:
        first = generator.randrange(1, 1000)
        if self.tokenizer is None:
            return self._counting_ids(first, length)
        ids: list[int] = []
        count, before = length, -1
        while len(ids) < length:
            ids = [*self._start(), *self._encode(" ".join(map(str, range(first, first + count))))]
            if len(ids) <= before:  # longer texts add no tokens
                raise ConsistencyError(
                    f"the tokenizer encodes {count:,} numbers as {len(ids)} tokens, the same as half of them, so dummy "
                    f"data of {length:,} tokens is not possible. Is it the tokenizer of another model?"
                )
            count, before = 2 * count, len(ids)
        return ids[:length]

    def _counting_ids(self, first: int, count: int) -> list[int]:
        start = first_text_token(self.vocabulary)
        return [start + index % (self.vocabulary - start) for index in range(first, first + count)]

    def _encode(self, text: str) -> list[int]:
        return self._tokenized(text, add_special_tokens=False)

    def _tokenized(self, text: str, **options: Any) -> list[int]:
        assert self.tokenizer is not None
        ids = self.tokenizer(text, **options)["input_ids"]
        if ids and max(ids) >= self.vocabulary:
            raise ConsistencyError(
                f"the tokenizer returns token {max(ids):,} ({self.tokenizer.decode([max(ids)])!r}), but the model's "
                f"embedding has {self.vocabulary:,} rows. It is another model's tokenizer, or the embedding was not "
                "resized (model.resize_token_embeddings)."
            )
        return ids

    def _start(self) -> list[int]:
        """Return the special tokens that the tokenizer adds before a text."""
        plain, marked = self._tokenized("a", add_special_tokens=False), self._tokenized("a")
        return marked[: max(0, len(marked) - len(plain))] if marked[-len(plain) :] == plain else []
