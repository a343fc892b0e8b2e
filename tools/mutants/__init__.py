"""Mutants: bugs planted one by one. The generated tests must find each in every model that can have it.

The catalog holds real mistakes as data. Each entry describes the structure it needs (`Bug.is_possible`) and how to
plant it into our models, adapters, loaders and exporters. The reference stays correct. `python -m tools.mutants` plants
each bug into every architecture and runs the generated tests until one fails.
"""

from tools.mutants import configuration, groups, layers, sequences, tensors
from tools.mutants.planting import Mutant

CATALOG: tuple[Mutant, ...] = (
    *groups.MUTANTS,
    *layers.MUTANTS,
    *configuration.MUTANTS,
    *tensors.MUTANTS,
    *sequences.MUTANTS,
)
"""All mutants."""

__all__ = ["CATALOG", "Mutant"]
