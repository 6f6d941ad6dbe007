"""Build the results of reading resources, and read an operation's input from text."""

from base64 import b64encode
from collections.abc import Mapping
from typing import Any, cast

import msgspec

from operations._json import (
    MAX_REQUEST_VALUES,
    JSONValueError,
    decode_json,
    list_of,
    object_of,
)
from operations.envelopes import (
    HTTPResponseMeta,
    MCPResponseMeta,
    ResourceContent,
    ResponseEnvelope,
)
from operations.mcp.exported import passed_meta
from operations.mcp.serving.addresses import Addresses, Resource, prefixed
from operations.mcp.serving.catalog import properties_of
from operations.mcp.serving.results import sniffed, text_of
from operations.specs import OperationSpec
from operations.types import JSONObject


def resource_result(
    envelope: ResponseEnvelope[Any], uri: str, resource: Resource, addresses: Addresses
) -> JSONObject:
    """Return the `resources/read` result of an envelope: text, a blob, or the contents that an MCP server gave.

    Args:
        envelope: What the operation gave.
        uri: The address that the client asked for.
        resource: What was read.
        addresses: The addresses of all resources.
    """
    data, meta, mime_type = envelope.data, envelope.meta, resource.mime_type
    if resource.source is not None and isinstance(meta, MCPResponseMeta):
        return _imported(envelope, uri, resource, addresses)
    if isinstance(meta, MCPResponseMeta):
        passed_on = [
            msgspec.to_builtins(block.resource)
            for block in meta.content
            if isinstance(block, ResourceContent)
        ]
        if passed_on:
            return {"contents": passed_on}
    if mime_type is None and isinstance(meta, HTTPResponseMeta):
        mime_type = meta.content_type or None
    content: JSONObject = {"uri": uri}
    if isinstance(data, bytes):
        content["mimeType"] = mime_type or sniffed(data)
        content["blob"] = b64encode(data).decode("ascii")
    else:
        content["mimeType"] = mime_type or (
            "text/plain" if isinstance(data, str) else "application/json"
        )
        content["text"] = text_of(data)
    return {"contents": [content]}


def _imported(
    envelope: ResponseEnvelope[Any], uri: str, resource: Resource, addresses: Addresses
) -> JSONObject:
    namespace = cast("str", resource.source)
    contents: list[JSONObject] = []
    for each in list_of(envelope.data):
        content: JSONObject = dict(object_of(each))
        given = str(content.get("uri", ""))
        # What was asked for has the address that was asked for; other contents have their own.
        is_read = prefixed(namespace, given) == uri
        content["uri"] = uri if is_read or given == uri else addresses.link(namespace, given)
        if "_meta" in content:
            content["_meta"] = passed_meta(content["_meta"])
        contents.append(content)
    result: JSONObject = {"contents": contents}
    passed = passed_meta(cast("MCPResponseMeta", envelope.meta).meta)
    return {**result, "_meta": passed} if passed else result


def publish_addresses(blocks: list[JSONObject], namespace: str, addresses: Addresses) -> None:
    """Rewrite the addresses in the result of an imported tool to those under which clients find them here.

    The address of an embedded resource changes only if another source claims it.
    """
    for block in blocks:
        if block.get("type") == "resource_link":
            block["uri"] = addresses.link(namespace, str(block.get("uri", "")))
        elif block.get("type") == "resource":
            resource = object_of(block.get("resource"))
            uri = str(resource.get("uri", ""))
            block["resource"] = {**resource, "uri": addresses.public(namespace, uri) or uri}


def arguments_from_text(spec: OperationSpec, values: Mapping[str, Any]) -> JSONObject:
    """An input whose values came as text: what is to be no string is read as JSON, if it is that."""
    properties = properties_of(spec)
    return {name: _read(value, properties.get(name, {})) for name, value in values.items()}


def _read(value: Any, schema: JSONObject) -> Any:
    kind = schema.get("type")
    if not isinstance(value, str) or kind is None or kind == "string" or "string" in kind:
        return value
    try:
        return decode_json(value, max_values=MAX_REQUEST_VALUES)
    except JSONValueError:
        # The operation's own validation says what is wrong with it.
        return value
