r"""The operations with which a worker describes itself, and the codec for many specs.

`services.list` and `services.schema` return specs. `services.describe` sends all of them in small pieces, in which a
definition that many specs share is sent once:

    {"definitions": {"0": {"Customer": "{...}", "Address": "{...}"}},
     "operations": ["{\"spec\": {...}, \"scopes\": [\"0\", null], \"timeoutMs\": 120000}"],
     "leftOut": {"big.one": "..."}}

The scopes of an operation are those of its input, its output and its errors. A schema with a scope is sent without its
`$defs`, which are the definitions of that scope that it refers to, directly or indirectly. Definitions and operations
are JSON texts, so that the receiver decodes only those that it needs. `timeoutMs` is the time limit of an operation
that may take longer than the default of clients.

Rule 1: the encoding is lossless. A schema whose definitions cannot be restored in this way is sent whole.
Rule 2: a definition is sent no later than the first operation that needs it.
Rule 3: a spec that is not JSON, or larger than a message, is listed in `leftOut` with the reason. The others are sent.
        `services.list` has no place for the reason, so the worker logs it.
Rule 4: a caller sees only the operations that it may call.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import suppress
from functools import partial
from hashlib import sha256
from time import monotonic
from typing import Any

import msgspec
from msgspec.structs import replace

from operations._decoding import decode_json
from operations._json import (
    MAX_DEPTH,
    MAX_DOCUMENT_DEPTH,
    MAX_DOCUMENT_VALUES,
    JSONValueError,
    as_json,
    is_object,
    object_of,
)
from operations._references import DefinitionReferences, Placed, Scopes
from operations._resilience import MAX_SECONDS, LogThrottle
from operations.calls.jobs import DEFAULT_TIMEOUT
from operations.context import OperationContext, may_call
from operations.errors import CallError, ErrorCode, operation_not_found
from operations.front.limits import call_seconds
from operations.pubsub.base import EventTarget
from operations.registry import OperationRegistry
from operations.schema import Schema, from_schema
from operations.specs import Operation, OperationSpec, OperationType
from operations.types import JSONObject, JSONSchema

logger = logging.getLogger("operations")

PIECE = 128 * 1024
"""The size of a piece in bytes."""

MAX_SPECS = 64 * 1024 * 1024
"""The largest total size of the specs of one worker, in bytes."""

WRAPPING = 4096
"""The overhead of a message around a piece, in bytes."""

_MIN_MESSAGE = WRAPPING + 2048
"""The least size of messages in which specs are sent, in bytes."""

_NAMED = 16
"""The overhead of a name in a piece, in bytes."""

_HELD = 1024
"""The memory overhead of a spec or a definition, in bytes."""

_encode = msgspec.json.encode


class SpecEncoder:
    """Encodes specs as pieces, one spec after the other.

    Args:
        max_bytes: The largest message.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes - WRAPPING
        self._scopes = Scopes()
        self._piece: JSONObject = {}
        self._size = 0

    def add(self, spec: OperationSpec, seconds: float | None = None) -> Iterator[JSONObject]:
        """Add a spec and its time limit, if it has one; return the completed pieces."""
        placed: list[Placed | None] = []
        try:
            # Placed one by one: if one fails, the earlier ones are removed again.
            placed.extend(self._scopes.place(schema.document) for schema in _schemas_of(spec))
            parts = list(_parts(spec, placed, seconds))
        except (ValueError, TypeError, RecursionError) as error:
            reason = f"its spec is not JSON: {error}"
        else:
            largest = max(part.size for part in parts)
            if largest <= self._max_bytes:
                for part in parts:
                    yield from self._add(part)
                return
            reason = f"a part of its spec takes {largest:,} bytes, and a message holds {self._max_bytes:,}"
        for place in placed:
            if place is not None:
                self._scopes.take_back(place)
        yield from self._add(_Part(reason, None, spec.id))

    def rest(self) -> Iterator[JSONObject]:
        """Return the last piece, if there is one."""
        if self._piece:
            yield self._taken()

    def _add(self, part: "_Part") -> Iterator[JSONObject]:
        if self._size and self._size + part.size > min(PIECE, self._max_bytes):
            yield self._taken()
        self._size += part.size
        part.put_into(self._piece)

    def _taken(self) -> JSONObject:
        piece, self._piece, self._size = self._piece, {}, 0
        return piece


class _Part:
    """One entry of a piece: a definition, an operation, or the reason why an operation is omitted."""

    def __init__(self, text: str, scope: str | None = None, name: str = "") -> None:
        self._text = text
        self._scope = scope
        self._name = name
        # The size in a message, with escaped quotes.
        self.size = len(_encode(text)) + len(_encode(name)) + _NAMED

    def put_into(self, piece: JSONObject) -> None:
        if self._scope is not None:
            definitions = piece.setdefault("definitions", {})
            definitions.setdefault(self._scope, {})[self._name] = self._text
        elif self._name:
            piece.setdefault("leftOut", {})[self._name] = self._text
        else:
            piece.setdefault("operations", []).append(self._text)


def _parts(
    spec: OperationSpec, placed: list[Placed | None], seconds: float | None
) -> Iterator[_Part]:
    """Return the parts of a spec: the new definitions, then the spec without definitions."""
    for place in placed:
        if place is not None:
            for name, definition in place.fresh.items():
                yield _Part(_encode(definition).decode(), place.scope, name)
    bare = [
        schema if place is None else Schema(place.root)
        for schema, place in zip(_schemas_of(spec), placed, strict=True)
    ]
    entry: JSONObject = {
        "spec": _with_schemas(spec, bare).to_wire(),
        "scopes": [place and place.scope for place in placed],
    }
    if seconds is not None:
        entry["timeoutMs"] = seconds * 1000
    yield _Part(_encode(entry).decode())


class _Piece(msgspec.Struct, rename="camel"):
    definitions: dict[str, dict[str, str]] = {}
    operations: list[str] = []
    left_out: dict[str, str] = {}


class _Entry(msgspec.Struct, rename="camel"):
    spec: Any
    scopes: list[str | None]
    timeout_ms: float | None = None


class SpecDecoder:
    """Decodes the specs in pieces.

    Attributes:
        specs: The specs, in the order in which they were sent.
        timeouts: The time limits of operations that may take longer than the default, in seconds by id; at most 600.
        left_out: The reasons why specs are missing, with their ids if known.
    """

    def __init__(self) -> None:
        self.specs: list[OperationSpec] = []
        self.timeouts: dict[str, float] = {}
        self.left_out: list[str] = []
        self._scopes: dict[str, _Definitions] = {}
        self._left = MAX_SPECS

    def add(self, piece: Any) -> None:
        """Decode one piece.

        Raises:
            CallError: `UNKNOWN_ERROR` if the piece is malformed, `RESOURCE_EXHAUSTED` if there are too many specs.
        """
        try:
            decoded = msgspec.convert(piece, _Piece)
        except msgspec.ValidationError as error:
            raise CallError(
                ErrorCode.UNKNOWN_ERROR, f"the description is malformed: {error}"
            ) from error
        self._enforce_size(decoded)
        self.left_out += [f"{name}: {reason}" for name, reason in decoded.left_out.items()]
        for scope, definitions in decoded.definitions.items():
            self._scopes.setdefault(scope, _Definitions()).add(definitions)
        for text in decoded.operations:
            try:
                entry = msgspec.convert(_decoded(text), _Entry)
                spec = self._spec(entry)
                self.specs.append(spec)
                if entry.timeout_ms is not None and entry.timeout_ms > DEFAULT_TIMEOUT * 1000:
                    # The sender may be a third party, whose operations must not keep callers waiting without limit.
                    self.timeouts[spec.id] = min(entry.timeout_ms / 1000, MAX_SECONDS)
            except (ValueError, RecursionError) as error:
                self.left_out.append(str(error))

    def _enforce_size(self, piece: _Piece) -> None:
        texts = [*piece.operations, *piece.left_out.values()]
        for definitions in piece.definitions.values():
            texts += definitions.values()
        self._left -= sum(map(len, texts)) + _HELD * len(texts)
        if self._left < 0:
            reason = f"the specs take more than {MAX_SPECS:,} bytes"
            raise CallError(ErrorCode.RESOURCE_EXHAUSTED, reason, retryable=False)

    def _spec(self, entry: _Entry) -> OperationSpec:
        spec = OperationSpec.from_wire(entry.spec)
        schemas = list(_schemas_of(spec))
        if len(entry.scopes) != len(schemas):
            raise ValueError(
                f"{spec.id} has {len(schemas)} schemas, and {len(entry.scopes)} scopes"
            )
        for index, scope in enumerate(entry.scopes):
            if scope is not None:
                definitions = self._scopes.setdefault(scope, _Definitions())
                whole = partial(definitions.completed, schemas[index].document)
                schemas[index] = Schema(whole, lenient=True)
        return _with_schemas(spec, schemas)


class _Definitions(Mapping[str, JSONSchema]):
    """The definitions of one scope, decoded when needed."""

    def __init__(self) -> None:
        self._texts: dict[str, str] = {}
        self._read: dict[str, JSONSchema] = {}
        self._references = DefinitionReferences()

    def add(self, definitions: dict[str, str]) -> None:
        """Add definitions; known definitions are not replaced."""
        self._texts = {**definitions, **self._texts}

    def __getitem__(self, name: str) -> JSONSchema:
        if name not in self._read:
            self._read[name] = _definition(name, self._texts[name])
        return self._read[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._texts)

    def __len__(self) -> int:
        return len(self._texts)

    def completed(self, root: JSONSchema) -> JSONSchema:
        """Return a schema with the definitions that it refers to."""
        if not is_object(root):
            return root
        reached = self._references.reach(root, self)
        return {**root, "$defs": {name: self[name] for name in self if name in reached}}


def _decoded(text: str) -> Any:
    return decode_json(text, max_values=MAX_DOCUMENT_VALUES, max_depth=MAX_DOCUMENT_DEPTH)


def _definition(name: str, text: str) -> JSONSchema:
    try:
        found = _decoded(text)
    except JSONValueError as error:
        found = None
        logger.warning(
            "The definition %r cannot be decoded and accepts any value instead: %s", name, error
        )
    return found if is_object(found) or isinstance(found, bool) else True


def _schemas_of(spec: OperationSpec) -> Iterator[Schema]:
    yield spec.input_schema
    yield spec.output_schema
    for error in spec.error_schemas:
        yield error.schema


def _with_schemas(spec: OperationSpec, schemas: list[Schema]) -> OperationSpec:
    """Return `spec` with other schemas, in the order of `_schemas_of`."""
    errors = tuple(
        replace(error, schema=schema)
        for error, schema in zip(spec.error_schemas, schemas[2:], strict=True)
    )
    return replace(spec, input_schema=schemas[0], output_schema=schemas[1], error_schemas=errors)


LIST = "services.list"
DESCRIBE = "services.describe"
SCHEMA = "services.schema"
SERVICES = frozenset({LIST, DESCRIBE, SCHEMA})
"""The operations that every worker serves."""

MAX_LIST = 4 * 1024 * 1024
"""The largest size of specs in one response, in bytes, because encoding it blocks the event loop."""

_AT_ONCE = 0.005
"""Seconds of work on specs after which other tasks may run."""

_MAX_DIGESTED = 500
"""The largest number of operations whose schemas are part of a registry's digest."""

_LIST_SPEC = OperationSpec(
    name="list",
    namespace="services",
    version="1.0.0",
    type=OperationType.QUERY,
    description="The specs of all operations that the caller may call.",
    input_schema=from_schema(
        {"type": ["object", "null"], "properties": {"namespace": {"type": "string"}}}
    ),
    output_schema=from_schema({"type": "array", "items": {"type": "object"}}),
)

_DESCRIBE_SPEC = replace(
    _LIST_SPEC,
    name="describe",
    type=OperationType.SUBSCRIPTION,
    description="The specs of all operations that the caller may call, in pieces, with shared definitions sent once.",
    output_schema=from_schema({"type": "object"}),
)

_SCHEMA_SPEC = replace(
    _LIST_SPEC,
    name="schema",
    description="The spec of one operation.",
    input_schema=from_schema(
        {
            "type": "object",
            "properties": {"operationId": {"type": "string"}},
            "required": ["operationId"],
        }
    ),
    output_schema=from_schema({"type": "object"}),
)


def digest_of(registry: OperationRegistry) -> str:
    """Return a digest of the operations of a registry, with which callers detect changes."""
    specs = registry.specs()
    texts = [f"{spec.id} {spec.version}".encode() for spec in specs]
    # Encoding the schemas of a large API takes seconds; ids and versions detect most changes.
    for spec in specs if len(specs) <= _MAX_DIGESTED else ():
        with suppress(TypeError, ValueError, RecursionError):
            texts.append(spec.encode())
    texts += [
        f"{spec.id} {seconds}".encode()
        for spec in specs
        if (seconds := _long_timeout(registry, spec)) is not None
    ]
    return sha256(b"\n".join(sorted(texts))).hexdigest()[:32]


def _long_timeout(registry: OperationRegistry, spec: OperationSpec) -> float | None:
    """Return the time limit of an operation in seconds, if it is longer than the default of clients."""
    if spec.type is OperationType.SUBSCRIPTION:
        return None
    seconds = call_seconds(registry.get(spec.id), DEFAULT_TIMEOUT)
    return seconds if seconds > DEFAULT_TIMEOUT else None


def _listed(spec: OperationSpec) -> JSONObject:
    """Return the spec as JSON, for an item of a response.

    Raises:
        CallError: `EXECUTION_ERROR` if it is not JSON.
    """
    try:
        return object_of(as_json(spec.to_wire(), MAX_DEPTH - 1))
    except (ValueError, TypeError, RecursionError) as error:
        message = f"the spec of {spec.id} is not JSON: {error}"
        raise CallError(ErrorCode.EXECUTION_ERROR, message) from error


def service_operations(registry: OperationRegistry, target: EventTarget) -> list[Operation]:
    """Return the operations that describe a registry to callers at the other end of `target`."""
    left_out = LogThrottle()

    async def visible(input: Any, context: OperationContext) -> AsyncGenerator[OperationSpec]:
        namespace: str | None = input.get("namespace") if input else None
        resumed = monotonic()
        for spec in registry.specs():
            if namespace in {None, spec.namespace} and may_call(spec, context):
                yield spec
            if monotonic() - resumed > _AT_ONCE:
                # A large API has large specs.
                await asyncio.sleep(0)
                resumed = monotonic()

    async def list_operations(input: Any, context: OperationContext) -> list[Any]:
        listed: list[Any] = []
        most = min(MAX_LIST, target.max_bytes - WRAPPING)
        left = most
        async for spec in visible(input, context):
            try:
                wire = _listed(spec)
            except CallError as error:
                logger.log(left_out.level(), "%s leaves out an operation: %s", LIST, error.message)
                continue
            left -= len(_encode(wire))
            if left < 0:
                raise CallError(
                    ErrorCode.RESOURCE_EXHAUSTED,
                    f"the specs take more than {most:,} bytes; subscribe to {DESCRIBE}, or ask for one "
                    f"namespace, or for one operation with {SCHEMA}",
                    retryable=False,
                )
            listed.append(wire)
        return listed

    async def describe_operations(
        input: Any, context: OperationContext
    ) -> AsyncGenerator[JSONObject]:
        if target.max_bytes < _MIN_MESSAGE:
            raise CallError(
                ErrorCode.RESOURCE_EXHAUSTED,
                f"specs need messages of {_MIN_MESSAGE:,} bytes or more, and the limit is {target.max_bytes:,} bytes: "
                "raise it (max_payload of nats-server, or max_bytes=), and restart the workers",
                retryable=False,
            )
        encoder = SpecEncoder(target.max_bytes)
        async for spec in visible(input, context):
            for piece in encoder.add(spec, _long_timeout(registry, spec)):
                yield piece
        for piece in encoder.rest():
            yield piece

    async def show_operation(input: Any, context: OperationContext) -> Any:
        async for spec in visible(None, context):
            if spec.id == input["operationId"]:
                return _listed(spec)
        raise operation_not_found(input["operationId"])

    return [
        Operation(_LIST_SPEC, list_operations, output="off", needs_grant=False),
        Operation(_DESCRIBE_SPEC, describe_operations, output="off", needs_grant=False),
        Operation(_SCHEMA_SPEC, show_operation, output="off", needs_grant=False),
    ]
