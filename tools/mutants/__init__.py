"""Mutants: bugs planted one by one, which the generated tests must find in every model that can have them.

A test that cannot fail proves nothing. The catalogue holds mistakes of the real world as data, each with the structure
it needs (`Bug.is_possible`) and how it is planted into our models, adapters, loaders and exporters; the reference stays
right. `python -m tools.mutants` plants each into every architecture and runs the generated tests until one fails.
"""

from tools.mutants import configuration, groups, layers, sequences, tensors
from tools.mutants.planting import Mutant

CATALOGUE: tuple[Mutant, ...] = (
    *groups.MUTANTS,
    *layers.MUTANTS,
    *configuration.MUTANTS,
    *tensors.MUTANTS,
    *sequences.MUTANTS,
)
"""All of them."""

__all__ = ["CATALOGUE", "Mutant"]
