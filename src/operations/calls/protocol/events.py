"""The events between callers and workers: five of the protocol, and five for flow control and failure detection.

Every event is `{"type", "id", "payload"}` in JSON; names on the wire are camelCase.

    call.requested   caller -> one worker    run an operation
    call.responded   worker -> caller        the envelope; many for a subscription
    call.completed   worker -> caller        the end of a subscription
    call.error       worker -> caller        the end of a call, with an error code
    call.aborted     either way              stop the call, or: the call was stopped
    call.credit      caller -> its worker    the total number of items that may be sent
    call.probed      caller -> workers       asks which of these calls the worker has
    call.alive       worker -> caller        the response; also sent to all callers when a worker starts or stops
    call.offered     worker -> caller        asks whether a request that waited may still start
    call.confirmed   caller -> worker        the request may start

Rule 1: a peer needs only the first five. The others are optional and may be ignored.
Rule 2: unknown fields and types are skipped; malformed events are returned by `read_event`, never raised.
"""

from collections.abc import Callable
from contextlib import suppress
from math import ceil
from types import NoneType
from typing import Annotated, Any, TypeAlias, get_args

import msgspec

from operations.base.errors import CallError, ErrorCode
from operations.base.json.decoding import enforce_bounds
from operations.base.json.values import (
    MAX_DEPTH,
    MAX_REQUEST_VALUES,
    JSONLimitError,
    nests_within,
    object_of,
)
from operations.base.types import JSONObject
from operations.contract.access import Identity
from operations.contract.envelopes import (
    HTTPResponseMeta,
    LocalResponseMeta,
    MCPResponseMeta,
    ResponseEnvelope,
    ResponseMeta,
    content_block,
)
from operations.pubsub.base import PUT_TYPE, EventTarget, WorkerStats

PROTOCOL_VERSION = 1
"""The newest protocol version that we support in `requiredVersion` of a request."""


Name: TypeAlias = Annotated[str, msgspec.Meta(max_length=512)]
"""An id or an address. Its length is limited, because it is stored."""


_MAX_MS = 2**53 - 1

Milliseconds: TypeAlias = (
    Annotated[int, msgspec.Meta(ge=0, le=_MAX_MS)]
    | Annotated[float, msgspec.Meta(ge=0, le=_MAX_MS)]
)
"""A time or a duration on the wire: an integer. Fractions, which older clients send, are accepted."""

RemainingMilliseconds: TypeAlias = (
    Annotated[int, msgspec.Meta(ge=-_MAX_MS, le=_MAX_MS)]
    | Annotated[float, msgspec.Meta(ge=-_MAX_MS, le=_MAX_MS)]
)
"""The time that a caller still has; clients that subtract may send a negative number, which has expired."""


def milliseconds(seconds: float) -> int:
    """Return a number of seconds as milliseconds for the wire, rounded up."""
    return ceil(min(max(seconds * 1000, 0), _MAX_MS))


class _Payload(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """The payload of an event: camelCase on the wire, without fields that have their default."""


class RequestPayload(_Payload, frozen=True, kw_only=True):
    """The operation to run, its input, its caller and its deadline."""

    request_id: Name
    operation_id: Name
    # A field with a factory is optional to read and always written.
    input: Any = msgspec.field(default_factory=NoneType)
    parent_request_id: Name | None = None

    deadline: Milliseconds | None = None
    """Milliseconds since the epoch, by the caller's clock."""

    timeout_ms: RemainingMilliseconds | None = None
    """Milliseconds from the arrival of the request; takes precedence over `deadline`, because clocks differ."""

    idle_timeout: Milliseconds | None = None
    """The longest time between two items of a subscription, in milliseconds."""

    identity: Identity | None = None
    """Used on trusted targets only."""

    credential: str | None = None
    """A token that the worker's resolver verifies."""

    metadata: JSONObject | None = None

    reply_to: Name | None = None
    """The mailbox for replies."""

    credit: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """The number of items of a subscription that may be sent before more credit is granted; None for no limit."""

    attempt: int = 1
    """Counts possible executions: increased when a call that may have started is sent again."""

    resends: int = 0
    """Numbers the copies of a request that is sent again, so that a worker can drop a specific copy."""

    key: Name | None = None
    """Names the step of a run that the request is, the same in all attempts of the run. The handler may read it."""

    checked: Name | None = None
    """The digest of the checked form of the input, which rules of the caller have read: the worker rejects the request
    if its handler would receive another one."""

    required_version: int | None = None
    """The worker rejects the request unless it supports this version of the protocol."""


class UnreadMCPMeta(MCPResponseMeta, frozen=True, kw_only=True, tag_field="source", tag="mcp"):
    """The metadata of an MCP result with undecoded blocks, which may have unknown fields and types."""

    content: list[Any]


class Output(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A decoded envelope."""

    data: Any = msgspec.field(default_factory=NoneType)
    """Other implementations omit it if there is no value."""

    meta: LocalResponseMeta | HTTPResponseMeta | UnreadMCPMeta
    encoding: str | None = None


class ResponsePayload(_Payload, frozen=True, kw_only=True):
    """A result, or one item of a subscription."""

    request_id: Name

    output: Output

    sequence: int | None = None
    """The position of the item in a subscription, counted from 0."""

    reply_to: Name | None = None
    """The address of the worker."""


class CompletePayload(_Payload, frozen=True, kw_only=True):
    """The end of a subscription."""

    request_id: Name

    sequence: int | None = None
    """The total number of items, with which the caller detects that the last ones were lost."""


class AbortPayload(_Payload, frozen=True, kw_only=True):
    """The call to stop."""

    request_id: Name

    resends: int | None = None
    """If set, only this copy of the request, which was offered, must not start."""


class ErrorPayload(_Payload, frozen=True, kw_only=True):
    """The error of a call."""

    request_id: Name
    code: str
    message: str = msgspec.field(default_factory=str)
    details: Any = None
    retryable: bool = False
    unexpected: bool = False

    sequence: int | None = None
    """The number of items of a subscription before the error."""

    begun: bool | None = None
    """False if the handler was not started, so that the request can be sent to another worker."""

    worker: Name | None = None
    """The address of the worker, if `begun` is false."""

    resends: int = 0
    """The number of the copy of the request, if `begun` is false."""

    leaving: bool = False
    """Whether the call was interrupted because the worker stops, and may run again on another worker."""

    missing: bool = False
    """Whether the operation is unavailable because its source is not connected at this worker; another may have it."""

    def to_error(self) -> CallError:
        """Return the exception for this error."""
        error = CallError(
            self.code,
            self.message,
            self.details,
            retryable=self.retryable,
            begun=False if self.begun is False else None,
        )
        error.unexpected = self.unexpected
        return error


class CreditPayload(_Payload, frozen=True, kw_only=True):
    """The number of items that the consumer accepts."""

    request_id: Name

    credit: int
    """The total number of items that may be sent; a total, so that a repeated event is harmless."""


class FencePayload(_Payload, frozen=True, kw_only=True):
    """A copy of a request that a worker drops without starting it, so that another copy can be sent."""

    request_id: Name
    resends: int = 0

    age_ms: Milliseconds = 0
    """Milliseconds since the caller first sent the request; a worker may no longer remember older requests."""


class ProbePayload(_Payload, frozen=True, kw_only=True):
    """The calls that a caller asks about."""

    request_ids: Annotated[list[Name], msgspec.Meta(max_length=10_000)]
    reply_to: Name

    fences: Annotated[list[FencePayload], msgspec.Meta(max_length=10_000)] = []
    """Copies that the worker should drop, unless they have started."""

    holders: bool = False
    """Whether only workers that have one of the calls should respond."""

    stats: bool = False
    """Whether the worker should report its `WorkerStats`."""

    replayable: bool = False
    """Whether the worker should report which of its operations may run again."""


class AlivePayload(_Payload, frozen=True, kw_only=True):
    """A report of a worker: that it is present, and which calls of a probe it has."""

    worker: Name
    """The address of the worker."""

    request_ids: list[Name] = []

    fenced: list[FencePayload] = []
    """The copies that did not start on this worker, and will not."""

    arrived: bool = False
    """The worker has connected or reconnected: requests that were being sent to it may be lost."""

    accepts: bool = False
    """The worker accepts requests at its address."""

    leaving: bool = False
    """The worker does not accept further requests."""

    specs: Name = ""
    """A digest of the operations that the worker serves."""

    silence_ms: Milliseconds | None = None
    """Milliseconds for which the worker may not respond although it is connected, if it needs more than its
    clients allow."""

    stats: WorkerStats | None = None
    """Set if the probe requested it."""

    replayable: str | None = None
    """The list of the operations of the worker that may run again; set if the probe requested it."""


class OfferPayload(_Payload, frozen=True, kw_only=True):
    """A request that its worker starts only if the caller still waits for it."""

    request_id: Name
    worker: Name
    """The address of the worker."""

    attempt: int = 1
    resends: int = 0


class ConfirmPayload(_Payload, frozen=True, kw_only=True):
    """The call is still open, and no other worker has it."""

    request_id: Name


class _Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """The parts that every event has."""

    id: str = ""
    """Empty, because the request id is in the payload. Other implementations repeat it here."""


class CallRequested(_Event, frozen=True, kw_only=True, tag="call.requested"):
    """A caller requests an operation."""

    payload: RequestPayload


class CallResponded(_Event, frozen=True, kw_only=True, tag="call.responded"):
    """A worker returns a result."""

    payload: ResponsePayload


class CallCompleted(_Event, frozen=True, kw_only=True, tag="call.completed"):
    """A subscription has ended."""

    payload: CompletePayload


class CallAborted(_Event, frozen=True, kw_only=True, tag="call.aborted"):
    """A call is aborted."""

    payload: AbortPayload


class CallFailed(_Event, frozen=True, kw_only=True, tag="call.error"):
    """A call ended with an error."""

    payload: ErrorPayload


class CallCredited(_Event, frozen=True, kw_only=True, tag="call.credit"):
    """A consumer grants credit."""

    payload: CreditPayload


class CallProbed(_Event, frozen=True, kw_only=True, tag="call.probed"):
    """A caller probes its calls."""

    payload: ProbePayload


class CallAlive(_Event, frozen=True, kw_only=True, tag="call.alive"):
    """A worker reports its presence and its calls."""

    payload: AlivePayload


class CallOffered(_Event, frozen=True, kw_only=True, tag="call.offered"):
    """A worker asks whether a request that waited may begin."""

    payload: OfferPayload


class CallConfirmed(_Event, frozen=True, kw_only=True, tag="call.confirmed"):
    """A caller allows a request to begin."""

    payload: ConfirmPayload


CallEvent: TypeAlias = (
    CallRequested
    | CallResponded
    | CallCompleted
    | CallAborted
    | CallFailed
    | CallCredited
    | CallProbed
    | CallAlive
    | CallOffered
    | CallConfirmed
)

_decode: Callable[[bytes], CallEvent] = msgspec.json.Decoder(CallEvent).decode


encode_event = msgspec.json.Encoder().encode
"""The JSON text of an event."""


class UnknownEvent(msgspec.Struct, frozen=True):
    """An event of an unknown type."""

    type: str


class MalformedEvent(msgspec.Struct, frozen=True):
    """A message that is not an event, with the parts of a request that could be decoded, for a reply."""

    reason: str
    type: str = ""
    request_id: str = ""
    reply_to: str = ""
    code: str = ErrorCode.VALIDATION_ERROR


_SMALL = 16 * 1024
"""Bytes of a message that is decoded before its depth is known, because that is quicker: it cannot build much."""


def read_event(
    body: bytes, max_values: int = MAX_REQUEST_VALUES
) -> CallEvent | UnknownEvent | MalformedEvent:
    """Return the event in a JSON text. Never raises."""
    event: CallEvent | None = None
    size = len(body)
    # A value takes at least one byte and a separator.
    if size < _SMALL and size < 2 * max_values:
        try:
            event = _decode(body)
        except (ValueError, RecursionError):
            pass  # The text is read again below, for a precise error.
        else:
            if _is_shallow(event):
                return event
    rejected = _over_limit(body, max_values)
    if rejected is not None:
        return rejected
    try:
        return event or _decode(body)
    except (ValueError, RecursionError) as error:
        reason = str(error)
    try:
        return _read_newer(body)
    except (ValueError, RecursionError):
        return _salvage(body, reason)


def _read_newer(body: bytes) -> CallResponded:
    """Return a result with the parts of its meta that are known, such as the kinds of changes."""
    event = object_of(msgspec.json.decode(body))
    output = object_of(object_of(event.get("payload")).get("output"))
    output["meta"] = ResponseEnvelope.from_wire(output).meta
    return msgspec.convert(msgspec.to_builtins(event), CallResponded)


def _is_shallow(event: CallEvent) -> bool:
    """Return whether an event is known to be nested within the limit. Only common requests and results are examined."""
    if type(event) is CallRequested:
        request = event.payload
        has_more = request.metadata is not None or request.identity is not None
        return not has_more and nests_within(request.input, MAX_DEPTH)
    if type(event) is CallResponded:
        output = event.payload.output
        return type(output.meta) is LocalResponseMeta and nests_within(output.data, MAX_DEPTH)
    return False


def _over_limit(body: bytes, max_values: int) -> UnknownEvent | MalformedEvent | None:
    """Return the parts of an event that is too large; None if it is not."""
    try:
        enforce_bounds(body, max_values=max_values)
    except JSONLimitError as error:
        event = _salvage(body, f"it {error.reason}")
        is_invalid = error.limit == "depth" and event.type == PUT_TYPE
        if is_invalid or isinstance(event, UnknownEvent):
            return event
        return msgspec.structs.replace(event, code=ErrorCode.RESOURCE_EXHAUSTED)
    return None


class _SalvagedPayload(msgspec.Struct, frozen=True, rename="camel"):
    request_id: str = ""
    reply_to: msgspec.Raw = msgspec.Raw(b"null")


class _Salvaged(msgspec.Struct, frozen=True):
    """The type of an event, and its payload, which may have any size and is not decoded."""

    type: str
    payload: msgspec.Raw = msgspec.Raw()


_KNOWN_TYPES = frozenset(kind.__struct_config__.tag for kind in get_args(CallEvent))

_salvager = msgspec.json.Decoder(_Salvaged)
_payload_salvager = msgspec.json.Decoder(_SalvagedPayload)
_read_text = msgspec.json.Decoder(str).decode


def _salvage(body: bytes, reason: str) -> UnknownEvent | MalformedEvent:
    """Return the parts of a malformed event that can be decoded."""
    try:
        salvaged = _salvager.decode(body)
    except (ValueError, RecursionError):
        return MalformedEvent(reason)
    kind = salvaged.type
    if kind not in _KNOWN_TYPES:
        return UnknownEvent(kind)
    try:
        payload = _payload_salvager.decode(salvaged.payload)
    except (ValueError, RecursionError):
        return MalformedEvent(reason, kind)
    reply_to = ""
    with suppress(ValueError):
        reply_to = _read_text(payload.reply_to)
    return MalformedEvent(reason, kind, payload.request_id, reply_to)


def _read_blocks(meta: UnreadMCPMeta) -> MCPResponseMeta:
    names = MCPResponseMeta.__struct_fields__
    fields: dict[str, Any] = {name: getattr(meta, name) for name in names}
    fields["content"] = [content_block(block) for block in meta.content]
    return MCPResponseMeta(**fields)


def read_output(output: Output) -> ResponseEnvelope[Any]:
    """Return the envelope in a `call.responded`.

    Raises:
        ValueError: If it is not an envelope.
    """
    if output.encoding is not None:
        return ResponseEnvelope.from_wire(msgspec.to_builtins(output))
    meta = output.meta
    known: ResponseMeta = _read_blocks(meta) if type(meta) is UnreadMCPMeta else meta
    return ResponseEnvelope(output.data, known)


# Built without structs, which take twice as long, because every call and item is encoded here.


def encode_response(request_id: str, envelope: ResponseEnvelope[Any], more: bytes = b"") -> bytes:
    """Return the `call.responded` that ends a call; `more` are further fields of its payload."""
    is_binary = isinstance(envelope.data, bytes)
    return b'{"type":"call.responded","id":"","payload":{"requestId":%b,"output":%b%b}}' % (
        encode_event(request_id),
        envelope.encode() if is_binary else encode_event(envelope),
        more,
    )


def encode_item(
    request_id: str, envelope: ResponseEnvelope[Any], sequence: int, reply_to: str
) -> bytes:
    """Return the `call.responded` of one item of a subscription."""
    # Only in the first item, because the worker does not change.
    worker = b"" if sequence else b',"replyTo":%b' % encode_event(reply_to)
    return encode_response(request_id, envelope, b',"sequence":%d%b' % (sequence, worker))


def encode_error(
    request_id: str,
    error: CallError,
    sequence: int | None = None,
    *,
    begun: bool | None = None,
    worker: str | None = None,
    resends: int = 0,
    leaving: bool = False,
    missing: bool = False,
) -> bytes:
    """Return the `call.error` that ends a call, without details that are not JSON."""
    payload = ErrorPayload(
        request_id=request_id,
        unexpected=error.unexpected,
        sequence=sequence,
        begun=begun,
        worker=worker,
        resends=resends,
        leaving=leaving,
        missing=missing,
        **error.to_wire(),
    )
    return encode_event(CallFailed(payload=payload))


MAX_METADATA = 16 * 1024
"""The largest metadata in bytes of JSON. Nested calls inherit metadata, and forward it to other processes."""


def check_request(request: RequestPayload) -> str | None:
    """Return the problem with the version, ids or metadata of a request of another process; None if they are valid."""
    version = request.required_version
    if version is not None and version > PROTOCOL_VERSION:
        return f"version {version} is required; this is {PROTOCOL_VERSION}"
    request_id, parent = request.request_id, request.parent_request_id
    if not _is_id(request_id):
        return "requestId must consist of visible ASCII characters"
    if parent is not None:
        if not _is_id(parent):
            return "parentRequestId must consist of visible ASCII characters"
        if parent == request_id:
            return "parentRequestId must be the id of another call"
    if not request.metadata:
        return None
    for name in ("traceparent", "tracestate"):
        value = request.metadata.get(name, "")
        if not (isinstance(value, str) and value.isascii() and value.isprintable()):
            return f"metadata.{name} must be printable ASCII text"
    if len(msgspec.json.encode(request.metadata)) > MAX_METADATA:
        return f"metadata must have at most {MAX_METADATA} bytes"
    return None


def _is_id(text: str) -> bool:
    return text != "" and text.isascii() and text.isprintable() and " " not in text


def enforce_limits(body: bytes, target: EventTarget, noun: str = "result") -> None:
    """Raise `RESOURCE_EXHAUSTED` if a result or a request exceeds the limits of its receiver."""
    size, reason = len(body), ""
    if size > target.max_bytes:
        reason = f"is {size} bytes, more than the {target.max_bytes} allowed"
    # A value takes at least one byte and a separator. The depth was checked before it was encoded.
    elif size >= 2 * target.max_values:
        try:
            enforce_bounds(body, max_values=target.max_values)
        except JSONLimitError as error:
            reason = error.reason
    if reason:
        raise CallError(ErrorCode.RESOURCE_EXHAUSTED, f"the {noun} {reason}")
