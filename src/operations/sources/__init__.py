"""Where operations come from: what a kind of source implements (`SourceKind`), and which kinds there are."""

from operations.sources.contract import Opened, Place, Skipped, SourceEntry, SourceKind

__all__ = ["Opened", "Place", "Skipped", "SourceEntry", "SourceKind"]
