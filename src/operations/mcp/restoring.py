"""How what a tool cannot say is written down, and read again: the counterpart of what `serving` does to a contract.

A tool takes an object, before 2026-07-28 it also gives one, and a result is blocks and one structured value. What does
not fit stands in a box, and the export says so beside the rest of the contract (`exported.META_KEY`):

    "input":  "any"         says nothing about its input      "boxed"       under `input`
              "object"      `type` was added at the root
    "output": "boxed"       under `result`                    "bytes"       bytes
              "items"       a subscription's list of items    "object"      `type` was added at the root

    "outputSchema": EXACT_OUTPUT    the listing accepts other results too, and has the exact schema there

Rule: only an export that is trusted is read; all of this is the other side's word.
"""

from base64 import b64decode
from collections.abc import Sequence
from typing import Any, Final, cast

from msgspec.structs import replace

from operations._json import list_of, object_of
from operations.envelopes import (
    AudioContent,
    ImageContent,
    MCPContentBlock,
    MCPResponseMeta,
    ResourceContent,
    ResponseEnvelope,
)
from operations.mcp.exported import EXACT_OUTPUT, META_KEY
from operations.schema import Schema
from operations.specs import OperationSpec
from operations.types import JSONObject, JSONSchema

DATA_KEY: Final = "alkdev.operations/data"
"""The key in a result's `_meta` that says what its data was: `bytes` or `null`."""

INPUT: Final = "input"
"""Where an input that is no object stands in the arguments, which always are one."""

RESULT: Final = "result"
"""Where a result that is no object stands for clients that take objects alone."""

DEFINITIONS: Final[tuple[str, ...]] = ("$defs", "definitions")
"""Keywords of a schema's root that contain shared definitions."""

BYTES: Final[JSONSchema] = {"type": "string", "contentEncoding": "base64"}


def restore_schemas(spec: OperationSpec, meta: Any) -> OperationSpec:
    """A contract as it was before it became a tool's.

    Args:
        spec: The contract as the tool's listing tells it.
        meta: The tool's `_meta`.
    """
    said = _said(meta)
    taken = spec.input_schema.document
    given = _exact(spec.output_schema.document, said.get("outputSchema"))
    return replace(
        spec,
        input_schema=Schema(_restored(taken, said.get("input"), INPUT), lenient=True),
        output_schema=Schema(_restored(given, said.get("output"), RESULT), lenient=True),
    )


def _exact(listed: JSONSchema, place: Any) -> JSONSchema:
    """Return the exact output schema of a tool that accepts every result."""
    members = list_of(listed.get("anyOf")) if isinstance(listed, dict) else []
    if place != EXACT_OUTPUT or not members:
        return listed
    shared = {key: object_of(listed)[key] for key in DEFINITIONS if key in object_of(listed)}
    exact: JSONSchema = {**object_of(members[0]), **shared} if shared else members[0]
    return moved(exact, "#", "#/anyOf/0")


def restore_arguments(input: Any, meta: Any) -> Any:
    """An operation's input as a tool's arguments."""
    return {INPUT: input} if _said(meta).get("input") == "boxed" else input


def restore_envelope(envelope: ResponseEnvelope[Any], meta: Any) -> ResponseEnvelope[Any]:
    """The envelope of a tool's result, with the data that the operation itself gave."""
    result = envelope.meta
    if not isinstance(result, MCPResponseMeta) or result.is_error:
        return envelope
    note = object_of(result.meta).get(DATA_KEY)
    if note == "null":
        return replace(envelope, data=None)
    if note == "bytes" and result.content:
        return replace(envelope, data=_bytes_of(result.content[0]))
    boxed = object_of(result.structured_content)
    if _said(meta).get("output") == "boxed" and RESULT in boxed:
        return replace(envelope, data=boxed[RESULT])
    return envelope


def _bytes_of(block: MCPContentBlock) -> bytes:
    if isinstance(block, ResourceContent):
        return b64decode(block.resource.blob or "")
    return b64decode(block.data if isinstance(block, (AudioContent, ImageContent)) else "")


def moved(schema: JSONSchema, to: str, since: str = "#") -> JSONSchema:
    """A schema that stands at `since` in its document, with its references to itself as they are at `to`."""
    return cast("JSONSchema", _moved(schema, to, since))


def _moved(node: Any, to: str, since: str) -> Any:
    if isinstance(node, list):
        return [_moved(item, to, since) for item in cast("Sequence[Any]", node)]
    if not isinstance(node, dict):
        return node
    return {
        key: to + value[len(since) :]
        if key in ("$ref", "$dynamicRef") and _is_at(value, since)
        else _moved(value, to, since)
        for key, value in cast("JSONObject", node).items()
    }


def _is_at(reference: Any, place: str) -> bool:
    return isinstance(reference, str) and (reference == place or reference.startswith(f"{place}/"))


def _restored(document: JSONSchema, how: Any, key: str) -> JSONSchema:
    if how == "any":
        return {}
    if how == "bytes":
        return BYTES
    if not isinstance(document, dict):
        return document
    if how == "object":
        return {name: value for name, value in document.items() if name != "type"}
    properties = object_of(document.get("properties"))
    if how == "boxed" and key in properties:
        return moved(properties[key], "#", f"#/properties/{key}")
    if how == "items" and "items" in properties:
        return moved(
            object_of(properties["items"]).get("items", {}), "#", "#/properties/items/items"
        )
    return document


def _said(meta: Any) -> JSONObject:
    return object_of(object_of(meta).get(META_KEY))
