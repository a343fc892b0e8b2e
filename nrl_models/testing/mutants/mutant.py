"""A mutant: a bug with a name."""

from __future__ import annotations

from dataclasses import dataclass

from nrl_models.testing.mutants.planting import Bug


@dataclass(frozen=True)
class Mutant:
    """A bug that the generated tests have to find.

    Args:
        name: what is wrong, in a few words; unique.
        stands_for: the mistake of the real world it stands for.
        bug: how it is planted, and where it can be.
        killers: the generated tests that ought to find it, the likeliest and quickest first; all others come after.
    """

    name: str
    stands_for: str
    bug: Bug
    killers: tuple[str, ...]
