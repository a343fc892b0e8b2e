"""Check whether an unknown key is a misspelling of a known one: the same words, spelled similarly."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher

SHORTEST_ABBREVIATION = 3
SHORTEST_TYPO = 4
"""Minimum length of a word that may be abbreviated or misspelled. Shorter words are distinct (`boi`, `eoi`)."""

ALIKE = 0.75
"""Minimum similarity (`difflib` ratio) of a misspelled word: two of four letters swapped, or one of seven wrong."""


def misspellings_of(key: str, known: Iterable[str]) -> list[str]:
    """Return the known keys that `key` is a misspelling of, in their order.

    `rms_norm_epsilon`, `rmsnorm_eps` and `rms_norms_eps` are misspellings of `rms_norm_eps`. A key with an additional
    word (`mtp_num_hidden_layers`) or a different word (`swa_head_dim`) is not a misspelling.
    """
    return [name for name in known if name != key and _is_misspelled(key, name)]


def _is_misspelled(key: str, name: str) -> bool:
    words, known_words = (text.lower().split("_") for text in (key, name))
    if "".join(words) == "".join(known_words):
        return True
    return len(words) == len(known_words) and all(map(_is_alike, words, known_words))


def _is_alike(word: str, known: str) -> bool:
    short, long = sorted((word, known), key=len)
    if word == known:
        return True
    if len(short) >= SHORTEST_ABBREVIATION and short[0] == long[0] and _has_letters(long, short):
        return True
    return len(short) >= SHORTEST_TYPO and SequenceMatcher(None, word, known, autojunk=False).ratio() >= ALIKE


def _has_letters(word: str, abbreviation: str) -> bool:
    """Return True if a word contains the letters of an abbreviation in order."""
    letters = iter(word)
    return all(letter in letters for letter in abbreviation)
