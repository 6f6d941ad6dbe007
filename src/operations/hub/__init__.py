"""A hub: everything that `operations.toml` names, in one registry and one application.

async with open_hub("operations.toml") as hub:
await hub.registry.execute("shop.list_orders", {})
await serve(hub.app)
"""

from operations.hub.hub import ALL, Hub, Source, Wish, open_hub

__all__ = ["ALL", "Hub", "Source", "Wish", "open_hub"]
