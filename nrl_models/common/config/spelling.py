"""Whether an unknown key is a known one, misspelt: the same words, each spelt alike."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import SequenceMatcher

SHORTEST_ABBREVIATION = 3
SHORTEST_TYPO = 4
"""Fewest letters of a word that may be an abbreviation or have a typo; shorter words are other words (`boi`, `eoi`)."""

ALIKE = 0.75
"""How like a word one with a typo is (`difflib`'s ratio): two letters swapped in four, one wrong in seven."""


def misspellings_of(key: str, known: Iterable[str]) -> list[str]:
    """Those of the known keys that `key` is a misspelling of, in their order.

    `rms_norm_epsilon`, `rmsnorm_eps` and `rms_norms_eps` are `rms_norm_eps` misspelt. A key with a word more
    (`mtp_num_hidden_layers`) or another word (`swa_head_dim`) is a key of its own.
    """
    return [name for name in known if name != key and _is_misspelt(key, name)]


def _is_misspelt(key: str, name: str) -> bool:
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
    """Whether a word has the letters of an abbreviation, in their order."""
    letters = iter(word)
    return all(letter in letters for letter in abbreviation)
