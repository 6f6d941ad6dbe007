"""Normalising values: a quick pass that strips and fills, a thorough one that converts, a report of the changes."""

from operations.schema.casting.passes import (
    Caches,
    CastPolicy,
    Normalise,
    Normaliser,
    caches_of,
    certain_types,
    mismatches,
)

__all__ = [
    "Caches",
    "CastPolicy",
    "Normalise",
    "Normaliser",
    "caches_of",
    "certain_types",
    "mismatches",
]
