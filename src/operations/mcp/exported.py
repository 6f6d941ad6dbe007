"""What an export of ours says of an operation beyond what MCP has words for: in a tool's `_meta`.

Shared by both directions. The importer believes it only where the operator trusts the server.
"""

import re
from collections.abc import Mapping
from typing import Any, Final, cast

import msgspec
from mcp_types import (
    CLIENT_CAPABILITIES_META_KEY,
    CLIENT_INFO_META_KEY,
    LOG_LEVEL_META_KEY,
    PROTOCOL_VERSION_META_KEY,
    SERVER_INFO_META_KEY,
)

from operations._json import list_of, object_of
from operations.context import NOTHING, OperationContext
from operations.observe import trace_context
from operations.specs import OperationSpec, OperationType
from operations.types import JSONObject

META_KEY = "alkdev.operations/spec"
"""The key in a tool's `_meta`."""

CHANGES_KEY = "alkdev.operations/changes"
"""The key in a result's `_meta`: what normalisation changed, as `changes` and `changesCount` of an envelope's meta."""

ERROR_KEY = "alkdev.operations/error"
"""The key in a result's `_meta`: the error of a tool that declares an output schema."""

EXACT_OUTPUT = "#/outputSchema/anyOf/0"
"""Where a listed tool has the exact output schema, if the listed one accepts every result."""

_RESERVED: Final = "alkdev.operations/"
_ENVELOPE: Final = frozenset({
    CLIENT_CAPABILITIES_META_KEY, CLIENT_INFO_META_KEY, LOG_LEVEL_META_KEY, PROTOCOL_VERSION_META_KEY,
    SERVER_INFO_META_KEY, "progressToken",
})  # fmt: skip
"""Keys by which the two ends of one connection describe themselves; they say nothing to others."""


_PROTOCOL: Final = re.compile(r"([\w-]+\.)*(modelcontextprotocol|mcp)(\.[\w-]+)*/", re.ASCII)
"""Prefixes that the protocol reserves."""

_CREDENTIAL: Final = re.compile(
    r"auth|bearer|cookie|credential|key|passw|secret|session|token", re.IGNORECASE
)
_MAX_SENT: Final = 8 * 1024


def passed_meta(meta: Any) -> JSONObject:
    """Return the `_meta` of another server that may be passed on: without our keys and those of its connection."""
    return {
        key: value
        for key, value in object_of(meta).items()
        if not key.startswith(_RESERVED) and key not in _ENVELOPE
    }


def sent_meta(meta: Any) -> Mapping[str, Any]:
    """Return the `_meta` of a client's request that the server of an imported operation gets.

    Keys of the protocol and of ours concern only this connection. Trace context is passed on separately. Keys that
    name a credential, and more than `_MAX_SENT` bytes, are not passed on.
    """
    sent = {
        key: value
        for key, value in passed_meta(meta).items()
        if "/" in key and not _PROTOCOL.match(key) and not _CREDENTIAL.search(key)
    }
    return sent if sent and len(msgspec.json.encode(sent)) <= _MAX_SENT else NOTHING


def with_caller_meta(params: JSONObject, context: OperationContext, *, modern: bool) -> JSONObject:
    """Return a copy of `params` with the caller's `_meta`, trace context and wanted log level (2026-07-28).

    Only the server that the caller itself addressed gets its `_meta`, not those that its call reaches in turn.
    """
    meta: JSONObject = {}
    if context.channel.meta and context.parent_request_id is None:
        meta |= context.channel.meta
    if context.metadata:
        meta |= trace_context(context.metadata)
    level = context.channel.log_level
    if level is not None and modern:
        meta[LOG_LEVEL_META_KEY] = level
    return {**params, "_meta": {**object_of(params.get("_meta")), **meta}} if meta else dict(params)


def is_imported(spec: OperationSpec) -> bool:
    """Return whether an operation was imported from an MCP server."""
    return spec.meta.get("source") == "mcp"


def with_passed(wire: JSONObject, listed: Mapping[str, Any], export: JSONObject) -> JSONObject:
    """Add the icons and `_meta` of an imported definition, and our own `_meta`, to an entry of a listing."""
    icons = list_of(listed.get("icons"))
    if icons:
        wire["icons"] = icons
    wire["_meta"] = {**passed_meta(listed.get("_meta")), META_KEY: export}
    return wire


_CARRIED = ("namespace", "name", "version", "type", "tags", "errorSchemas", "idempotent")


def export_spec(spec: OperationSpec) -> JSONObject:
    """What to put under `META_KEY`: the part of the contract that a tool's own fields do not carry."""
    wire = spec.to_wire()
    return {key: wire[key] for key in _CARRIED if key in wire}


def restore_spec(spec: OperationSpec, meta: Any) -> OperationSpec:
    """`spec` with what its exporter said of it; as it is if that says nothing usable."""
    said: Any = cast("JSONObject", meta).get(META_KEY) if isinstance(meta, dict) else None
    if not isinstance(said, dict):
        return spec
    said = cast("JSONObject", said)
    carried = {key: said[key] for key in _CARRIED if key in said}
    try:
        restored = OperationSpec.from_wire({**spec.to_wire(), **carried})
    except ValueError:
        return spec
    # A tool has one result, whatever the operation behind it was.
    return spec if restored.type is OperationType.SUBSCRIPTION else restored
