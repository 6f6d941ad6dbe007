"""The paths at which clients find the MCP server before they connect: its card, and a catalog with this card.

Rule: without `public_url`, the addresses are those of the request, whose `Host` was checked.
"""

from typing import Any, Final

import msgspec
from starlette.requests import Request

from operations.base.types import JSONObject
from operations.front.config import ServerConfig
from operations.front.messages import Reply
from operations.front.request import RequestState
from operations.server.entries import FixedPath, Page

CARD_PATH: Final = "/mcp/server-card"
CATALOG_TYPE: Final = "application/ai-catalog+json"


def card_paths(config: ServerConfig, service: Any) -> dict[str, FixedPath]:
    """Return the paths of the card and of the catalog.

    Args:
        config: The settings of the server.
        service: Serves MCP requests.
    """
    from operations.mcp.serving.cards import CARD_TYPE, card_catalog, server_card  # noqa: PLC0415 - needs an extra

    def address(state: RequestState) -> str:
        return (config.public_url or str(Request(state.scope).base_url)).rstrip("/")

    def card_of(state: RequestState) -> JSONObject:
        url = f"{address(state)}/mcp"
        needs_credential = not state.front.serves_anonymous()
        return server_card(service, state.identity, url, needs_credential=needs_credential)

    async def card(state: RequestState) -> Reply:
        return _reply(card_of(state), CARD_TYPE)

    async def catalog(state: RequestState) -> Reply:
        found = card_catalog(card_of(state), f"{address(state)}{CARD_PATH}")
        return _reply(found, CATALOG_TYPE)

    page = Page(card, is_open=True)
    return {
        CARD_PATH: page,
        "/.well-known/mcp/server-card": page,
        "/.well-known/ai-catalog.json": Page(catalog, is_open=True),
    }


def _reply(value: JSONObject, media_type: str) -> Reply:
    return Reply(200, msgspec.json.encode(value), [(b"content-type", media_type.encode())])
