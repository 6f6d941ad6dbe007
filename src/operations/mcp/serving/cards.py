"""The card of the server for clients that look for MCP servers before they connect (SEP-2127).

Rule: a card has nothing that its reader could not see as a client: a namespace is listed if the reader may call one of
        its operations, and no address, command or credential of a source is shown.
"""

import re
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import urlsplit

from mcp_types.version import HANDSHAKE_PROTOCOL_VERSIONS, MODERN_PROTOCOL_VERSIONS

from operations.base.types import JSONObject
from operations.contract.access import Identity
from operations.mcp.serving.service import Service
from operations.mcp.shared.codec import SOURCES_KEY

CARD_TYPE: Final = "application/mcp-server-card+json"
"""The media type of a card."""

_SCHEMA: Final = "https://static.modelcontextprotocol.io/schemas/v1/server-card.schema.json"
_LONGEST: Final = 100
"""The largest number of characters of a title or a description."""

_SHOWN: Final = ("name", "version", "title", "description", "websiteUrl")
"""The parts of the `serverInfo` of a source that a card repeats."""

_UNSAFE: Final = re.compile(r"[^A-Za-z0-9._-]+")


def server_card(
    service: Service, identity: Identity | None, url: str, *, needs_credential: bool
) -> JSONObject:
    """Return the card of a server.

    Args:
        service: Serves the registry.
        identity: The reader.
        url: The address of the server for MCP clients.
        needs_credential: Whether requests without a credential are rejected.
    """
    settings = service.settings
    title = settings.title or settings.name
    remote: JSONObject = {
        "type": "streamable-http",
        "url": url,
        "supportedProtocolVersions": [*HANDSHAKE_PROTOCOL_VERSIONS, *MODERN_PROTOCOL_VERSIONS],
    }
    if needs_credential:
        remote["headers"] = [{"name": "Authorization", "isRequired": True, "isSecret": True}]
    card: JSONObject = {
        "$schema": _SCHEMA,
        "name": _name(url, settings.name),
        "version": settings.version,
        "title": title[:_LONGEST],
        "description": f"The operations of {title}"[:_LONGEST],
        "remotes": [remote],
    }
    is_stranger = needs_credential and identity is None
    sources = {
        namespace: {"server": {key: info.server[key] for key in _SHOWN if key in info.server}}
        | info.offers
        for namespace, info in ({} if is_stranger else service.sources(identity)).items()
    }
    return {**card, "_meta": {SOURCES_KEY: sources}} if sources else card


def card_catalog(card: Mapping[str, Any], card_url: str) -> JSONObject:
    """Return the catalog of the address, with the card as its only entry."""
    publisher, _, name = str(card["name"]).partition("/")
    domain = ".".join(reversed(publisher.split("."))) if _is_name(publisher) else publisher
    entry = {
        "identifier": f"urn:air:{domain}:{name}",
        "displayName": card["title"],
        "type": CARD_TYPE,
        "url": card_url,
    }
    return {"specVersion": "1.0", "entries": [entry]}


def _name(url: str, name: str) -> str:
    """Return the name of the server: its host in reverse, and its own name."""
    host = urlsplit(url).hostname or "localhost"
    if ":" in host:
        host = "localhost"
    labels = host.split(".")
    publisher = ".".join(reversed(labels)) if _is_name(host) else host
    return f"{publisher}/{_UNSAFE.sub('-', name).strip('-') or 'mcp'}"[:200]


def _is_name(host: str) -> bool:
    """Return whether a host has a name, and not only an IPv4 address."""
    return not host.replace(".", "").isdigit()
