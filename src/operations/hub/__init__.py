"""A hub: everything that `operations.toml` names, in one registry (`hub.registry`) and one application (`hub.app`)."""

from operations.hub.hub import ALL, Hub, Wish, open_hub
from operations.hub.source import Source, SourceState

__all__ = ["ALL", "Hub", "Source", "SourceState", "Wish", "open_hub"]
