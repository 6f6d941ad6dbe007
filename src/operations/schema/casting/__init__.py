"""Making a value fit: a quick pass that strips and fills, and a thorough one that repairs."""

from operations.schema.casting.passes import Normalise, build_normalise, certain_types

__all__ = ["Normalise", "build_normalise", "certain_types"]
