"""The events between callers and workers: five of the protocol, and five for flow control and failure detection.

Every event is `{"type", "id", "payload"}` in JSON; names on the wire are camelCase.

    call.requested   caller -> one worker    run this
    call.responded   worker -> caller        the envelope; many for a subscription
    call.completed   worker -> caller        a subscription's end
    call.error       worker -> caller        a call's end, with a code
    call.aborted     either way              stop, or: it was stopped
    call.credit      caller -> its worker    how many items may have been sent in all
    call.probed      caller -> workers       which of these calls do you have?
    call.alive       worker -> caller        these; to all callers, when it starts or stops
    call.offered     worker -> caller        this request waited: may it still begin?
    call.confirmed   caller -> worker        it may

Rule 1: whoever speaks only the first five is understood. The others are extras that may be ignored.
Rule 2: unknown fields and types are skipped; what cannot be read is reported by `read_event`, never raised.
"""

from typing import Annotated, Any, TypeAlias, cast

import msgspec

from operations._collector import build_from
from operations._json import MAX_REQUEST_VALUES, JSONLimitError, enforce_bounds
from operations.access import Identity
from operations.envelopes import (
    HTTPResponseMeta,
    LocalResponseMeta,
    MCPResponseMeta,
    ResponseEnvelope,
    ResponseMeta,
    content_block,
)
from operations.errors import CallError, ErrorCode
from operations.pubsub.base import WorkerStats
from operations.types import JSONObject

PROTOCOL_VERSION = 1
"""The newest version that may be required of us by `requiredVersion` in a request."""


Name: TypeAlias = Annotated[str, msgspec.Meta(max_length=512)]
"""An id or an address. They are remembered, so nobody may make them as long as they like."""


def _null() -> None:
    """Return None. A field with this factory is optional to read and always written."""


class _Payload(msgspec.Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True):
    """camelCase on the wire, absent where it is the default."""


class RequestPayload(_Payload, frozen=True, kw_only=True):
    """What to run, for whom, and until when."""

    request_id: Name
    operation_id: Name
    input: Any = msgspec.field(default_factory=_null)
    parent_request_id: Name | None = None

    deadline: float | None = None
    """Milliseconds since the epoch, by the caller's clock."""

    timeout_ms: float | None = None
    """Milliseconds from arrival; preferred to `deadline`, because clocks differ."""

    idle_timeout: float | None = None
    """Milliseconds a subscription may go without an item."""

    identity: Identity | None = None
    """Believed on trusted targets only."""

    credential: str | None = None
    """A token that the worker's resolver verifies."""

    metadata: JSONObject | None = None

    reply_to: Name | None = None
    """The mailbox for answers."""

    credit: Annotated[int, msgspec.Meta(ge=1)] | None = None
    """Items of a subscription that may be sent before more are asked for; absent: as many as there are."""

    attempt: int = 1
    """Counts possible executions: it grows when a call is sent again that may have begun."""

    required_version: int | None = None
    """Refuse unless this version of the protocol is spoken."""


class UnreadMCPMeta(MCPResponseMeta, frozen=True, kw_only=True, tag_field="source", tag="mcp"):
    """The metadata of an MCP result before its blocks were read: they may have fields and types that we do not know."""

    content: list[Any]


class Output(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """An envelope as it was read."""

    data: Any = msgspec.field(default_factory=_null)
    """Other implementations leave it out if there is no value."""

    meta: LocalResponseMeta | HTTPResponseMeta | UnreadMCPMeta
    encoding: str | None = None


class ResponsePayload(_Payload, frozen=True, kw_only=True):
    """A result, or one item of a subscription."""

    request_id: Name

    output: Output
    """The undecoded JSON text if it is not an envelope that we know."""

    sequence: int | None = None
    """Items of a subscription, counted from 0."""

    reply_to: Name | None = None
    """The mailbox of the worker."""


class CompletePayload(_Payload, frozen=True, kw_only=True):
    """The end of a subscription."""

    request_id: Name

    sequence: int | None = None
    """How many items there were, so that a lost last one is missed."""


class AbortPayload(_Payload, frozen=True, kw_only=True):
    """Stop this call."""

    request_id: Name


class ErrorPayload(_Payload, frozen=True, kw_only=True):
    """Why a call failed."""

    request_id: Name
    code: str
    message: str = msgspec.field(default_factory=lambda: "")
    details: Any = None
    retryable: bool = False

    sequence: int | None = None
    """How many items of a subscription came before."""

    begun: bool | None = None
    """False if the handler was not started, so that the request can be sent to another worker."""

    worker: Name | None = None
    """The mailbox of the worker, if `begun` is false."""

    def to_error(self) -> CallError:
        """The exception this stands for."""
        return CallError(
            self.code,
            self.message,
            self.details,
            retryable=self.retryable,
            begun=False if self.begun is False else None,
        )


class CreditPayload(_Payload, frozen=True, kw_only=True):
    """More items are welcome."""

    request_id: Name

    credit: int
    """Items that may have been sent in all, not how many more: saying it twice does no harm."""


class ProbePayload(_Payload, frozen=True, kw_only=True):
    """Who has these calls?"""

    request_ids: Annotated[list[Name], msgspec.Meta(max_length=10_000)]
    reply_to: Name

    stats: bool = False
    """Whether the worker should report its `WorkerStats`."""


class AlivePayload(_Payload, frozen=True, kw_only=True):
    """The calls a worker has, of those it was asked about."""

    worker: Name
    """The worker's mailbox."""

    request_ids: list[Name] = []
    arrived: bool = False
    """The worker has connected or reconnected: requests that were on their way to it may be lost."""

    leaving: bool = False
    """The worker takes nothing new."""

    specs: Name = ""
    """A digest of the operations that the worker serves."""

    stats: WorkerStats | None = None
    """If the probe asked for them."""


class OfferPayload(_Payload, frozen=True, kw_only=True):
    """A request that a worker starts only if its caller still waits for it."""

    request_id: Name
    worker: Name
    """The worker's mailbox."""

    attempt: int = 1


class ConfirmPayload(_Payload, frozen=True, kw_only=True):
    """The call is still open, and no other worker has it."""

    request_id: Name


class _Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """The frame around every payload."""

    id: str = ""
    """Empty: the request id is in the payload. It may stand here too."""


class CallRequested(_Event, frozen=True, kw_only=True, tag="call.requested"):
    """A caller asks for an operation."""

    payload: RequestPayload


class CallResponded(_Event, frozen=True, kw_only=True, tag="call.responded"):
    """A worker answers."""

    payload: ResponsePayload


class CallCompleted(_Event, frozen=True, kw_only=True, tag="call.completed"):
    """A subscription has no more items."""

    payload: CompletePayload


class CallAborted(_Event, frozen=True, kw_only=True, tag="call.aborted"):
    """A call is not wanted any more."""

    payload: AbortPayload


class CallFailed(_Event, frozen=True, kw_only=True, tag="call.error"):
    """A call ended with an error."""

    payload: ErrorPayload


class CallCredited(_Event, frozen=True, kw_only=True, tag="call.credit"):
    """A consumer made room."""

    payload: CreditPayload


class CallProbed(_Event, frozen=True, kw_only=True, tag="call.probed"):
    """A caller looks for its calls."""

    payload: ProbePayload


class CallAlive(_Event, frozen=True, kw_only=True, tag="call.alive"):
    """A worker says that it is there, and with which calls."""

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

_decode = msgspec.json.Decoder(CallEvent).decode


class _UnreadPayload(ResponsePayload, frozen=True, kw_only=True):
    output: msgspec.Raw  # type: ignore[assignment]


class _UnreadResponse(CallResponded, frozen=True, kw_only=True, tag="call.responded"):
    payload: _UnreadPayload


_lenient = msgspec.json.Decoder(_UnreadResponse)

encode_event = msgspec.json.Encoder().encode
"""The JSON text of an event."""


class UnknownEvent(msgspec.Struct, frozen=True):
    """An event of a type that is not ours to understand."""

    type: str


class MalformedEvent(msgspec.Struct, frozen=True):
    """Something that is no event. What could be read of a request is kept, so that it can be answered."""

    reason: str
    type: str = ""
    request_id: str = ""
    reply_to: str = ""
    code: str = ErrorCode.VALIDATION_ERROR


def read_event(
    body: bytes, max_values: int = MAX_REQUEST_VALUES
) -> CallEvent | UnknownEvent | MalformedEvent:
    """Return the event in a JSON text. Never raises."""
    try:
        enforce_bounds(body, max_values=max_values)
    except JSONLimitError as error:
        return _over_limit(body, error)
    try:
        return cast("CallEvent", build_from(_decode, body))
    except (ValueError, RecursionError) as error:
        reason = str(error)
    try:
        # If it is not an envelope, the caller gets an error.
        unread = _lenient.decode(body)
    except (ValueError, RecursionError):
        return _salvage(body, reason)
    payload = ResponsePayload(**msgspec.structs.asdict(unread.payload))
    return CallResponded(id=unread.id, payload=payload)


def _over_limit(body: bytes, error: JSONLimitError) -> CallEvent | UnknownEvent | MalformedEvent:
    """A response that is too large to be decoded ends its call."""
    event = _salvage(body, f"it {error.reason}")
    if isinstance(event, MalformedEvent) and event.type == "call.responded" and event.request_id:
        payload = ErrorPayload(
            request_id=event.request_id,
            code=ErrorCode.RESOURCE_EXHAUSTED,
            message=f"the result {error.reason}",
        )
        return CallFailed(payload=payload)
    if isinstance(event, MalformedEvent) and error.limit != "depth":
        return msgspec.structs.replace(event, code=ErrorCode.RESOURCE_EXHAUSTED)
    return event


_NOTHING = msgspec.Raw()


class _SalvagedPayload(msgspec.Struct, frozen=True, rename="camel"):
    request_id: msgspec.Raw = _NOTHING
    reply_to: msgspec.Raw = _NOTHING


class _Salvaged(msgspec.Struct, frozen=True):
    """The parts of an event, not decoded: they may be of any size."""

    type: msgspec.Raw = _NOTHING
    payload: msgspec.Raw = _NOTHING


_KNOWN_TYPES: frozenset[str] = frozenset(
    {
        "call.requested",
        "call.responded",
        "call.completed",
        "call.aborted",
        "call.error",
        "call.credit",
        "call.probed",
        "call.alive",
        "call.offered",
        "call.confirmed",
    }
)

_salvager = msgspec.json.Decoder(_Salvaged)
_payload_salvager = msgspec.json.Decoder(_SalvagedPayload)
_text_decoder = msgspec.json.Decoder(str)


def _salvage(body: bytes, reason: str) -> UnknownEvent | MalformedEvent:
    """What can still be read of a text that is no event of ours."""
    try:
        salvaged = _salvager.decode(body)
        kind = _text_in(salvaged.type)
    except (ValueError, RecursionError):
        return MalformedEvent(reason)
    if kind is None:
        return MalformedEvent(reason)
    if kind not in _KNOWN_TYPES:
        return UnknownEvent(kind)
    try:
        payload = _payload_salvager.decode(salvaged.payload)
    except (ValueError, RecursionError):
        return MalformedEvent(reason, kind)
    request_id, reply_to = _text_in(payload.request_id), _text_in(payload.reply_to)
    return MalformedEvent(reason, kind, request_id or "", reply_to or "")


def _text_in(raw: msgspec.Raw) -> str | None:
    """Return the string that `raw` is, if it is one."""
    try:
        return _text_decoder.decode(raw)
    except ValueError:
        return None


def _read_meta(meta: LocalResponseMeta | HTTPResponseMeta | UnreadMCPMeta) -> ResponseMeta:
    if type(meta) is not UnreadMCPMeta:
        return cast("ResponseMeta", meta)
    fields: dict[str, Any] = {
        name: getattr(meta, name) for name in MCPResponseMeta.__struct_fields__
    }
    fields["content"] = [content_block(block) for block in meta.content]
    return MCPResponseMeta(**fields)


def read_output(output: Output | msgspec.Raw) -> ResponseEnvelope[Any]:
    """The envelope in a `call.responded`.

    Raises:
        ValueError: If there is none.
    """
    if type(output) is Output:
        if output.encoding is None:
            return ResponseEnvelope(output.data, _read_meta(output.meta))
        try:
            return ResponseEnvelope.from_wire(msgspec.to_builtins(output))
        except RecursionError:
            raise ValueError("not a response envelope: nested too deeply") from None
    return ResponseEnvelope.decode(bytes(cast("msgspec.Raw", output)))


# Spelled out by hand: structs take twice as long to build and encode, and these are said once for every call and item.


def encode_response(request_id: str, envelope: ResponseEnvelope[Any]) -> bytes:
    """The `call.responded` that ends a call."""
    return b'{"type":"call.responded","id":"","payload":{"requestId":%b,"output":%b}}' % (
        encode_event(request_id),
        envelope.encode(),
    )


def encode_item(
    request_id: str, envelope: ResponseEnvelope[Any], sequence: int, reply_to: str
) -> bytes:
    """The `call.responded` of one item of a subscription."""
    # Once is enough: the worker does not change.
    worker = b"" if sequence else b',"replyTo":%b' % encode_event(reply_to)
    return (
        b'{"type":"call.responded","id":"","payload":{"requestId":%b,"output":%b,"sequence":%d%b}}'
        % (
            encode_event(request_id),
            envelope.encode(),
            sequence,
            worker,
        )
    )


def encode_error(
    request_id: str,
    error: CallError,
    sequence: int | None = None,
    *,
    begun: bool | None = None,
    worker: str | None = None,
) -> bytes:
    """Return the `call.error` that ends a call, without details that are not JSON."""
    wire = error.to_wire()
    return encode_event(
        CallFailed(
            payload=ErrorPayload(
                request_id=request_id,
                code=wire["code"],
                message=wire["message"],
                details=wire.get("details"),
                retryable=error.retryable,
                sequence=sequence,
                begun=begun,
                worker=worker,
            )
        )
    )


MAX_METADATA = 16 * 1024
"""Bytes of JSON. Nested calls inherit metadata, and pass it on to other processes."""


def check_request(request: RequestPayload) -> str | None:
    """Return what is wrong with the ids or the metadata of a request from another process; None if nothing is."""
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
