"""The card of an MCP server, and the catalog in which clients find it."""

import re
from typing import Any

import aiohttp
import pytest
from mcp.server.mcpserver import MCPServer
from starlette.requests import Request

from operations import AccessControl, Identity, OperationRegistry
from operations.front.config import MCPServerSettings
from operations.mcp import MCPClientConfig, connect_mcp
from operations.server import create_app
from operations.server.http11.running import running

WELL_KNOWN = "/.well-known/mcp/server-card"
NAME = re.compile(r"[a-zA-Z0-9.-]+/[a-zA-Z0-9._-]+")


def upstream(name: str) -> MCPServer:
    server = MCPServer(name, title=f"The {name}", website_url=f"https://{name}.example")

    @server.tool()
    def look() -> str:
        return name

    return server


async def identify(request: Request) -> Identity | None:
    given = request.headers.get("authorization")
    return None if given is None else Identity("ada", ["secret"])


async def fetch(url: str, path: str, **headers: str) -> tuple[int, str, Any]:
    async with aiohttp.ClientSession(headers=headers) as http, http.get(url + path) as response:
        is_found = response.status == 200
        found = await response.json(content_type=None) if is_found else None
        return response.status, response.content_type, found


@pytest.mark.requirement("R77")
async def test_a_card_describes_the_hub_and_the_servers_that_its_reader_may_use() -> None:
    config = MCPClientConfig(server=upstream("rome"), access=AccessControl(["secret"]))
    settings = MCPServerSettings(name="my hub", title="My hub", version="2.1.0")
    async with (
        connect_mcp("oslo", MCPClientConfig(server=upstream("oslo"))) as oslo,
        connect_mcp("rome", config) as rome,
    ):
        registry = OperationRegistry(oslo)
        registry.register_all(rome)
        app = create_app(registry, mcp=settings, identity=identify)
        async with running(app) as url:
            status, kind, card = await fetch(url, WELL_KNOWN)
            _, _, same = await fetch(url, "/mcp/server-card")
            _, _, more = await fetch(url, WELL_KNOWN, Authorization="Bearer x")
            _, catalog_kind, catalog = await fetch(url, "/.well-known/ai-catalog.json")
            (entry,) = catalog["entries"]
            _, _, listed = await fetch(entry["url"], "")

    assert (status, kind) == (200, "application/mcp-server-card+json")
    assert catalog_kind == "application/ai-catalog+json"
    assert card == same == listed
    assert card["$schema"].endswith("/v1/server-card.schema.json")
    assert NAME.fullmatch(card["name"])
    assert card["name"] == "127.0.0.1/my-hub"
    assert (card["title"], card["version"]) == ("My hub", "2.1.0")
    assert 1 <= len(card["description"]) <= 100
    (remote,) = card["remotes"]
    assert (remote["type"], remote["url"]) == ("streamable-http", f"{url}/mcp")
    assert "2026-07-28" in remote["supportedProtocolVersions"]
    assert "headers" not in remote
    sources = card["_meta"]["alkdev.operations/sources"]
    assert sources.keys() == {"oslo"}
    assert sources["oslo"]["server"]["title"] == "The oslo"
    assert more["_meta"]["alkdev.operations/sources"].keys() == {"oslo", "rome"}
    assert entry["type"] == "application/mcp-server-card+json"


async def test_a_card_names_the_public_address_and_the_required_credential() -> None:
    async with (
        connect_mcp("oslo", MCPClientConfig(server=upstream("oslo"))) as oslo,
        running(
            create_app(
                OperationRegistry(oslo),
                mcp=True,
                anonymous=False,
                identity=identify,
                public_url="https://hub.example.com/",
            )
        ) as url,
    ):
        _, _, known = await fetch(url, WELL_KNOWN, Authorization="Bearer x")
        _, _, card = await fetch(url, WELL_KNOWN)
        _, _, catalog = await fetch(url, "/.well-known/ai-catalog.json")

    (remote,) = card["remotes"]
    assert card["name"] == "com.example.hub/operations"
    assert remote["url"] == "https://hub.example.com/mcp"
    assert remote["headers"] == [{"name": "Authorization", "isRequired": True, "isSecret": True}]
    assert "_meta" not in card
    assert "oslo" in known["_meta"]["alkdev.operations/sources"]
    (entry,) = catalog["entries"]
    assert entry["identifier"] == "urn:air:hub.example.com:operations"
    assert entry["url"] == "https://hub.example.com/mcp/server-card"


async def test_a_server_without_mcp_has_no_card() -> None:
    async with running(create_app(OperationRegistry())) as url:
        assert (await fetch(url, WELL_KNOWN))[0] == 404
