r"""How a worker describes itself to callers: its presence, its operations, and the codec for many specs.

`services.list` and `services.schema` return specs. `services.describe` sends all of them as a text, in pieces of any
size. The text has one line of JSON for each operation, and a definition that many specs share is sent once:

    {"spec": {...}, "scopes": ["0", null], "timeoutMs": 120000, "definitions": {"0": {"Customer": {...}}}}
    {"leftOut": "big.one: its spec is not JSON"}

The scopes of an operation are those of its input, its output and its errors. A schema with a scope is sent without its
`$defs`, which are the definitions of that scope that it refers to, directly or indirectly. `definitions` are those that
no earlier line has. `timeoutMs` is the time limit of an operation that may take longer than the default of clients.

Rule 1: the encoding is lossless. A schema whose definitions cannot be restored in this way is sent whole.
Rule 2: a definition is sent no later than the first operation that needs it, and decoded when it is needed.
Rule 3: a spec that is not JSON is listed in `leftOut` with the reason. The others are sent. `services.list` has no
        place for the reason, so the worker logs it.
Rule 4: a caller sees only the operations that it may call.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from hashlib import sha256
from time import monotonic
from typing import Any

import msgspec
from msgspec.structs import replace

from operations.base.errors import CallError, ErrorCode, operation_not_found
from operations.base.json.decoding import decode_json, enforce_bounds
from operations.base.json.references import DefinitionReferences, Placed, Scopes
from operations.base.json.values import (
    MAX_DEPTH,
    MAX_DOCUMENT_DEPTH,
    MAX_DOCUMENT_VALUES,
    JSONValueError,
    as_json,
    is_object,
    object_of,
)
from operations.base.logs import LogThrottle
from operations.base.time_limit import MAX_SECONDS
from operations.base.types import JSONObject, JSONSchema
from operations.calls.protocol.events import (
    AlivePayload,
    CallAlive,
    Milliseconds,
    encode_event,
    milliseconds,
)
from operations.calls.protocol.replayability import encode_list
from operations.calls.serving.jobs import DEFAULT_TIMEOUT, Served, WorkerConfig, quietly
from operations.calls.serving.runs import REPLAYABLE_VERBS
from operations.contract.access import Identity, check_access
from operations.contract.context import OperationContext, may_call
from operations.contract.specs import Operation, OperationSpec, OperationType
from operations.front.limits import call_seconds
from operations.pubsub.base import EventTarget
from operations.registry.registry import OperationRegistry
from operations.registry.remotes import CHECK, FormAnswer
from operations.schema import Schema, from_schema

logger = logging.getLogger("operations")

PIECE = 64 * 1024
"""The largest number of characters in a piece."""

_MIN_PIECE = 64

_CHARACTER = 4
"""The largest size of a character in a message, in bytes."""

MAX_SPECS = 64 * 1024 * 1024
"""The largest total size of the specs of one worker, in characters."""

WRAPPING = 4096
"""The overhead of a message around a piece, in bytes."""

_HELD = 1024
"""The memory overhead of a spec or a definition, in bytes."""

_encode = msgspec.json.encode


class SpecEncoder:
    """Encodes specs as lines of JSON, one spec after the other."""

    def __init__(self) -> None:
        self._scopes = Scopes()

    def add(self, spec: OperationSpec, seconds: float | None = None) -> str:
        """Return the line of a spec and its time limit, if it has one."""
        placed: list[Placed | None] = []
        try:
            # Placed one by one: if one fails, the earlier ones are removed again.
            placed.extend(self._scopes.place(schema.document) for schema in _schemas_of(spec))
            return _encode(_entry_of(spec, placed, seconds)).decode() + "\n"
        except (ValueError, TypeError, RecursionError) as error:
            for place in filter(None, placed):
                self._scopes.take_back(place)
            return _encode({"leftOut": f"{spec.id}: its spec is not JSON: {error}"}).decode() + "\n"


def _entry_of(
    spec: OperationSpec, placed: list[Placed | None], seconds: float | None
) -> JSONObject:
    """Return the entry of a spec: the spec without definitions, and the definitions that are new."""
    bare = [
        schema if place is None else Schema(place.root)
        for schema, place in zip(_schemas_of(spec), placed, strict=True)
    ]
    definitions: dict[str, JSONObject] = {}
    for place in filter(None, placed):
        definitions.setdefault(place.scope, {}).update(place.fresh)
    entry: JSONObject = {
        "spec": _with_schemas(spec, bare).to_wire(),
        "scopes": [place and place.scope for place in placed],
        "definitions": definitions,
    }
    return entry if seconds is None else {**entry, "timeoutMs": milliseconds(seconds)}


class _Entry(msgspec.Struct, rename="camel"):
    left_out: str = ""
    spec: msgspec.Raw = msgspec.Raw(b"null")
    scopes: list[str | None] = []
    definitions: dict[str, dict[str, msgspec.Raw]] = {}
    timeout_ms: Milliseconds | None = None


_read_entry = msgspec.json.Decoder(_Entry).decode


class SpecDecoder:
    """Decodes the specs in pieces of their text.

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
        self._line: list[str] = []
        self._left = MAX_SPECS

    def add(self, piece: Any) -> None:
        """Decode the lines that end in this piece.

        Raises:
            CallError: `UNKNOWN_ERROR` if the piece is malformed, `RESOURCE_EXHAUSTED` if there are too many specs.
        """
        if not isinstance(piece, str):
            raise CallError(ErrorCode.UNKNOWN_ERROR, "the description is malformed: not a text")
        *ends, rest = piece.split("\n")
        self._count(len(piece) + _HELD * len(ends))
        for end in ends:
            line, self._line = "".join((*self._line, end)), []
            try:
                self._decode(line)
            except (ValueError, RecursionError) as error:
                self.left_out.append(str(error))
        self._line.append(rest)

    def _count(self, size: int) -> None:
        self._left -= size
        if self._left < 0:
            reason = f"the specs take more than {MAX_SPECS:,} bytes"
            raise CallError(ErrorCode.RESOURCE_EXHAUSTED, reason, retryable=False)

    def _decode(self, line: str) -> None:
        raw = line.encode()
        # A definition is three levels below its line.
        enforce_bounds(raw, max_values=MAX_DOCUMENT_VALUES, max_depth=MAX_DOCUMENT_DEPTH + 3)
        entry = _read_entry(raw)
        for scope, definitions in entry.definitions.items():
            self._count(_HELD * (1 + len(definitions)))
            self._scopes.setdefault(scope, _Definitions()).add(definitions)
        if entry.left_out:
            self.left_out.append(entry.left_out)
            return
        spec = self._spec(entry)
        self.specs.append(spec)
        if entry.timeout_ms is not None and entry.timeout_ms > DEFAULT_TIMEOUT * 1000:
            # The sender may be a third party, whose operations must not keep callers waiting without limit.
            self.timeouts[spec.id] = min(entry.timeout_ms / 1000, MAX_SECONDS)

    def _spec(self, entry: _Entry) -> OperationSpec:
        spec = OperationSpec.from_wire(_decoded(entry.spec))
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
        self._texts: dict[str, msgspec.Raw] = {}
        self._read: dict[str, JSONSchema] = {}
        self._references = DefinitionReferences()

    def add(self, definitions: dict[str, msgspec.Raw]) -> None:
        """Add definitions; known definitions are not replaced."""
        for name, text in definitions.items():
            self._texts.setdefault(name, text)

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


def _decoded(text: msgspec.Raw) -> Any:
    return decode_json(bytes(text), max_values=MAX_DOCUMENT_VALUES, max_depth=MAX_DOCUMENT_DEPTH)


def _definition(name: str, text: msgspec.Raw) -> JSONSchema:
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
SERVICES = frozenset({CHECK, LIST, DESCRIBE, SCHEMA})
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
    description="The specs of all operations that the caller may call, as lines of JSON, with shared definitions sent "
    "once.",
    output_schema=from_schema({"type": "string"}),
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


_CHECK_SPEC = replace(
    _LIST_SPEC,
    name="check",
    description="The checked form of an input: what the handler of an operation would receive. Nothing runs.",
    input_schema=from_schema(
        {
            "type": "object",
            "properties": {"operationId": {"type": "string"}, "input": True},
            "required": ["operationId"],
        }
    ),
    output_schema=from_schema({"type": "object"}),
)


def digest_of(registry: OperationRegistry) -> str:
    """Return a digest of the operations of a registry, with which callers detect changes and compare workers."""
    specs = registry.specs()
    texts = [f"{spec.id} {spec.version} {spec.replayable}".encode() for spec in specs]
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


class Presence:
    """Reports to callers that a worker is present, and which operations it serves.

    Args:
        registry: The operations of the worker.
        target: Transports the reports.
        config: The settings of the worker.
        mailbox: The address of the worker.
        is_leaving: Returns whether the worker stops.

    Attributes:
        accepts: Whether the worker consumes requests.
    """

    def __init__(
        self,
        registry: OperationRegistry,
        target: EventTarget,
        config: WorkerConfig,
        mailbox: str,
        is_leaving: Callable[[], bool],
    ) -> None:
        self._registry = registry
        self._target = target
        self._config = config
        self._mailbox = mailbox
        self._is_leaving = is_leaving
        self._digest = ""
        self._replayable: tuple[int, str] = -1, ""
        self.accepts = False

    async def announce(self, *, arrived: bool = False) -> None:
        """Announce to all callers of the group that the worker has started, stops, or serves other operations."""
        callers = self._target.topic(f"{self._config.group}.callers")
        await self.report(callers, arrived=arrived, leaving=self._is_leaving())

    async def report(self, address: str, **fields: Any) -> None:
        """Report to a caller, with further fields of `AlivePayload`."""
        payload = AlivePayload(
            worker=self._mailbox,
            accepts=self.accepts and not self._is_leaving(),
            specs=self._digest,
            silence_ms=None if self._config.silence is None else milliseconds(self._config.silence),
            **fields,
        )
        await quietly(self._target.send(address, encode_event(CallAlive(payload=payload))))

    def note_specs(self) -> None:
        """Record which operations the worker serves now."""
        # The peer of a socket only needs to notice changes; other callers compare workers.
        registry = self._registry
        self._digest = str(registry.revision) if self._target.direct else digest_of(registry)

    def replayable(self) -> str | None:
        """Return the list of the operations that may run again; None if it is too large for a message.

        A server with its own rules lists only operations that the peer may call.
        """
        registry = self._registry
        if self._replayable[0] != registry.revision:
            identity = None if self._config.front is None else self._target.identity
            is_open = self._config.front is None
            ids = [
                spec.id
                for spec in registry.specs()
                if spec.replayable and (is_open or _may_see(spec, identity))
            ]
            own = SERVICES if registry.run_store is None else SERVICES | REPLAYABLE_VERBS
            ids += [name for name in own if name not in registry]
            self._replayable = registry.revision, encode_list(ids)
        text = self._replayable[1]
        return text if len(text) + WRAPPING <= self._target.max_bytes else None

    async def watch_specs(self, revision: int) -> None:
        """Announce operations that were registered, replaced or removed after `revision`."""
        while True:
            if self._registry.revision != revision:
                revision = self._registry.revision
                self.note_specs()
                await self.announce()
            await asyncio.sleep(self._config.heartbeat)


def _may_see(spec: OperationSpec, identity: Identity | None) -> bool:
    return check_access(spec.access_control, identity, spec.id, authority=spec.authority)


def served_by(
    registry: OperationRegistry, services: OperationRegistry, operation_id: str
) -> Served:
    """Return the settings of an operation of a worker; without a spec if neither registry has it.

    Args:
        registry: The operations of the worker.
        services: The operations that describe the worker.
        operation_id: The operation.
    """
    if operation_id in services and operation_id not in registry:
        registry = services
    spec = registry.get_spec(operation_id)
    if spec is None:
        # The operation is unknown, or a remote has it and knows whether it is replayable.
        return Served(registry, None, replayable=not registry.has_remote, is_stream=False)
    return Served(registry, spec, spec.replayable, spec.type is OperationType.SUBSCRIPTION)


class _Describing:
    """The handlers of the operations that describe a registry to callers at the other end of `target`."""

    def __init__(self, registry: OperationRegistry, target: EventTarget) -> None:
        self._registry = registry
        self._target = target
        self._left_out = LogThrottle()

    async def _visible(
        self, input: Any, context: OperationContext
    ) -> AsyncGenerator[OperationSpec]:
        namespace: str | None = input.get("namespace") if input else None
        resumed = monotonic()
        for spec in self._registry.specs():
            if namespace in {None, spec.namespace} and may_call(spec, context):
                yield spec
            if monotonic() - resumed > _AT_ONCE:
                # A large API has large specs.
                await asyncio.sleep(0)
                resumed = monotonic()

    async def list_operations(self, input: Any, context: OperationContext) -> list[Any]:
        """Return the specs, unless they are too large for one message."""
        listed: list[Any] = []
        most = min(MAX_LIST, self._target.max_bytes - WRAPPING)
        left = most
        async for spec in self._visible(input, context):
            try:
                wire = _listed(spec)
            except CallError as error:
                level = self._left_out.level()
                logger.log(level, "%s leaves out an operation: %s", LIST, error.message)
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
        self, input: Any, context: OperationContext
    ) -> AsyncGenerator[str]:
        """Yield the specs as pieces of text."""
        size = max(_MIN_PIECE, min(PIECE, (self._target.max_bytes - WRAPPING) // _CHARACTER))
        encoder, text = SpecEncoder(), ""
        async for spec in self._visible(input, context):
            text += encoder.add(spec, _long_timeout(self._registry, spec))
            if len(text) >= size:
                for start in range(0, len(text), size):
                    yield text[start : start + size]
                text = ""
        if text:
            yield text

    async def show_operation(self, input: Any, context: OperationContext) -> Any:
        """Return one spec."""
        async for spec in self._visible(None, context):
            if spec.id == input["operationId"]:
                return _listed(spec)
        raise operation_not_found(input["operationId"])

    async def check_input(self, input: Any, context: OperationContext) -> FormAnswer:
        """Return the checked form of an input."""
        operation_id = input["operationId"]
        # This operation is in a registry of its own.
        context = replace(context, registry=self._registry)
        checked = await self._registry.checked_input(operation_id, input.get("input"), context)
        return FormAnswer(checked.form, checked.problem)


def service_operations(registry: OperationRegistry, target: EventTarget) -> list[Operation]:
    """Return the operations that describe a registry to callers at the other end of `target`."""
    describing = _Describing(registry, target)
    return [
        Operation(_LIST_SPEC, describing.list_operations, output="off", needs_grant=False),
        Operation(_DESCRIBE_SPEC, describing.describe_operations, output="off", needs_grant=False),
        Operation(_SCHEMA_SPEC, describing.show_operation, output="off", needs_grant=False),
        Operation(_CHECK_SPEC, describing.check_input, output="off", needs_grant=False),
    ]
