"""A hub: everything that `operations.toml` names, in one registry (`hub.registry`) and one application (`hub.app`)."""

from operations.hub.hub import ALL, Hub, SourceFilter, open_hub
from operations.hub.source import Source, SourceState

__all__ = ["ALL", "Hub", "Source", "SourceFilter", "SourceState", "open_hub"]
