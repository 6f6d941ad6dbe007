"""A hub: everything that `operations.toml` names, in one registry (`hub.registry`) and one application (`hub.app`)."""

from operations.hub.hub import ALL, Hub, Source, Wish, open_hub

__all__ = ["ALL", "Hub", "Source", "Wish", "open_hub"]
