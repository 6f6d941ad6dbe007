"""Turn a handler's result into the caller's envelope, and count how calls end.

Rule 1: a value is an envelope only if it is a `ResponseEnvelope`. A mapping of the same shape is data.
Rule 2: every change to the data is listed in `meta.changes`, and logged once per operation and kind.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable, Container, Iterator, Sequence
from time import time_ns
from typing import Any, Final, TypeAlias, cast

import msgspec

from operations._json import TOO_LONG, as_json, count_values, to_json, without_objects
from operations._text import printable
from operations.envelopes import (
    MAX_CHANGES,
    DescribedEnvelope,
    LocalResponseMeta,
    MCPResponseMeta,
    ResponseEnvelope,
    ResponseMeta,
    TextContent,
    add_changes,
    local_envelope,
)
from operations.errors import CallError, ErrorCode, SchemaError
from operations.observe import add_counts
from operations.schema import Change, CompiledSchema, Normalise, Schema
from operations.specs import OperationSpec, OutputPolicy

logger = logging.getLogger("operations")

Envelope: TypeAlias = ResponseEnvelope[Any]
Finisher: TypeAlias = Callable[[Any], Envelope]

_BITS = TOO_LONG.bit_length()
_PLAIN = frozenset({bool, dict, float, int, list, str, type(None)})
"""Types of results that are neither envelopes nor bytes."""

_ANY_BUT_TEXT = Schema({"type": ["object", "array", "number", "boolean", "null"]})
"""The schema of a JSON response that was declared without a schema: text is then a mismatch."""


def finisher(spec: OperationSpec, policy: OutputPolicy) -> Finisher:
    """Return the function that turns a handler's result into the caller's envelope."""
    operation_id = spec.id
    compiled = None if policy == "off" else _compiled(operation_id, spec.output_schema)
    normalise = _normalise(operation_id, compiled, policy)
    certain = frozenset[type]() if compiled is None else compiled.certain
    containers = frozenset({dict}) if compiled is None else compiled.open_containers
    log = ChangeLog(operation_id)

    def finish(result: Any) -> Envelope:
        kind = type(result)  # pyright: ignore[reportUnknownVariableType]
        changes = None
        if kind in certain and (kind is not int or result.bit_length() < _BITS):
            data = result
        elif kind in containers:
            data = to_json(result)
        else:
            if kind is int:
                to_json(result)  # rejected if it has too many digits
            elif kind not in _PLAIN:
                if kind is DescribedEnvelope:
                    return finish_described(result)
                if isinstance(result, ResponseEnvelope):
                    return pass_on(result)  # pyright: ignore[reportUnknownArgumentType]
                if isinstance(result, (bytes, bytearray, memoryview)):
                    return local_envelope(bytes(cast("bytes", result)), operation_id)
            data, changes = normalise(result)
        timestamp = time_ns() // 1_000_000
        if changes is None:
            # `local_envelope`, inlined: this is the last step of nearly every call.
            meta = LocalResponseMeta(operation_id=operation_id, timestamp=timestamp)
        else:
            log.note(changes)
            meta = LocalResponseMeta(
                operation_id=operation_id,
                timestamp=timestamp,
                changes=tuple(changes[:MAX_CHANGES]),
                changes_count=sum([change.count for change in changes]),
            )
        return ResponseEnvelope(data, meta)

    def pass_on(envelope: Envelope) -> Envelope:
        """Return a handler's own envelope with its meta; normalise its data if there is a schema."""
        meta: ResponseMeta = envelope.meta
        if isinstance(envelope.data, (bytes, bytearray, memoryview)) or (
            not isinstance(meta, LocalResponseMeta)
            and (compiled is None or _is_not_described(envelope))
        ):
            return proper(envelope)
        data, changes = normalise(envelope.data)
        if changes is not None:
            log.note(changes)
            meta = add_changes(meta, changes)
        return ResponseEnvelope(data, meta)

    finish_described = _described_finisher(spec, policy, log)
    return finish


_LARGE = 10_000
"""Results of other services with at least this many values are normalised in a thread."""


_LARGE_TEXT = 1024 * 1024


ENVELOPES: Final = frozenset({ResponseEnvelope, DescribedEnvelope})
"""The types of envelopes, for a check that is much faster than `isinstance` of a struct."""


def is_large(envelope: Envelope) -> bool:
    """Return whether normalising the result of a service could block the event loop for long."""
    data = envelope.data
    if type(envelope) is DescribedEnvelope:
        if envelope.is_clean:
            return False
        schema, size = envelope.schema, envelope.size
        if schema is not None and schema.casts_slowly:
            return True
        # A JSON value takes at least two bytes, including its separator.
        if size is not None and size <= 2 * _LARGE:
            return False
    if type(data) is str:
        return len(data) > _LARGE_TEXT
    return type(data) in (dict, list) and count_values(data, _LARGE) > _LARGE


def _described_finisher(
    spec: OperationSpec, policy: OutputPolicy, log: "ChangeLog"
) -> Callable[[DescribedEnvelope[Any]], Envelope]:
    """Return the function that normalises an envelope with the envelope's own schema.

    Args:
        spec: The operation.
        policy: The output policy.
        log: Logs changes.
    """
    known: dict[tuple[int, bool], tuple[Schema, Normalise | None]] = {}

    def find(schema: Schema, is_raw: bool) -> Normalise | None:
        # No policy replaces text that was received instead of JSON.
        used: OutputPolicy = "cast" if is_raw and policy == "create" else policy
        compiled = None if used == "off" else _compiled(spec.id, schema)
        found = None if compiled is None else _normalise(spec.id, compiled, used, owns=True)
        # Hold a reference to the schema, so that its `id()` stays unique.
        known[id(schema), is_raw] = (schema, found)
        return found

    def finish_described(envelope: DescribedEnvelope[Any]) -> Envelope:
        data, meta, schema, is_raw = envelope.data, envelope.meta, envelope.schema, envelope.is_raw
        if envelope.is_clean:
            return ResponseEnvelope(data, meta)
        if is_raw and (schema is None or schema.is_unknown):
            schema = _ANY_BUT_TEXT
        if schema is None or type(data) is bytes:
            return proper(ResponseEnvelope(data, meta))
        if schema.casts_slowly:
            with schema.first_cast():
                return finish_described(envelope)
        entry = known.get((id(schema), is_raw))
        normalise = find(schema, is_raw) if entry is None else entry[1]
        if normalise is None:
            return proper(ResponseEnvelope(data, meta))
        data, changes = normalise(data)
        if changes is not None:
            log.note(changes)
            meta = add_changes(meta, changes)
        return ResponseEnvelope(data, meta)

    return finish_described


def _is_not_described(envelope: Envelope) -> bool:
    """Return whether the output schema does not apply, because the data is an MCP error, text or content blocks."""
    meta = envelope.meta
    if not isinstance(meta, MCPResponseMeta):
        return False
    if meta.is_error or meta.structured_content is not None:
        return meta.is_error
    # If the only text block contains JSON, the adapter has decoded it, and the schema applies.
    texts = [block.text for block in meta.content if isinstance(block, TextContent)]
    plain = (texts[0], msgspec.to_builtins(meta.content)) if len(texts) == 1 else ()
    return not plain or envelope.data in plain


def of_middleware(result: object) -> Envelope:
    """Return the checked result of a middleware.

    Raises:
        TypeError: If it is not a `ResponseEnvelope`.
    """
    if not isinstance(result, ResponseEnvelope):
        raise TypeError(f"a middleware must return an envelope, not {type(result).__name__}")
    return proper(result)  # pyright: ignore[reportUnknownArgumentType]


def proper(envelope: Envelope) -> Envelope:
    """Return an envelope that user code created, with its data converted to JSON or bytes."""
    data: Any = envelope.data
    if type(data) is bytes:
        return envelope
    if isinstance(data, (bytes, bytearray, memoryview)):
        return ResponseEnvelope(bytes(cast("bytes", data)), envelope.meta)
    plain = as_json(data)
    return envelope if plain is data else ResponseEnvelope(plain, envelope.meta)


def _normalise(
    operation_id: str,
    compiled: CompiledSchema | None,
    policy: OutputPolicy,
    *,
    owns: bool = False,
) -> Normalise:
    """Return the function that converts a result to JSON and applies `policy`; for `owns` see `normaliser`."""
    if compiled is None:
        return lambda value: (to_json(without_objects(value)), None)
    if policy == "cast" or policy == "keep" or policy == "create":
        return compiled.normaliser(policy, owns=owns)
    is_valid = compiled.is_valid

    def warn(value: Any) -> tuple[Any, list[Change] | None]:
        data = to_json(without_objects(value))
        return data, None if is_valid(data) else compiled.mismatches(data)

    def refuse(value: Any) -> tuple[Any, list[Change] | None]:
        data = to_json(without_objects(value))
        if not is_valid(data):
            raise CallError(
                ErrorCode.EXECUTION_ERROR,
                f"{operation_id} returned a result that does not fit its output schema",
                {"errors": msgspec.to_builtins(compiled.errors(data))},
            )
        return data, None

    return refuse if policy == "strict" else warn


def _compiled(operation_id: str, schema: Schema) -> CompiledSchema | None:
    """Return the compiled schema; None if it is unknown or cannot be used."""
    try:
        return None if schema.is_unknown else schema.compile()
    except SchemaError as error:
        logger.warning("%s: the output schema is not used: %s", operation_id, error)
        return None


class ChangeLog:
    """Logs the first change of each kind to the results of one operation."""

    def __init__(self, operation_id: str) -> None:
        self._operation_id = operation_id
        self._logged: set[str] = set()

    def note(self, changes: Sequence[Change]) -> None:
        """Log changes of kinds that have not been logged yet."""
        for change in changes:
            if change.kind not in self._logged:
                self._logged.add(change.kind)
                logger.warning(
                    "%s: %s: %s %s. More of this kind is not logged: see meta.changes",
                    self._operation_id,
                    "a result does not fit its output schema"
                    if change.kind == "mismatch"
                    else f"part of a result was {change.kind}",
                    # Property names may come from a third party: escape line breaks, so that they cannot forge a log
                    # line.
                    printable(change.path) or "(root)",
                    printable(change.message),
                )


# ------------------------------------------------------------ counting

BUCKETS: Final = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0)
"""Upper bounds of the histogram of durations, in seconds."""


UNKNOWN: Final = "(unknown)"
"""The series for all unregistered operations, because callers can send any number of unknown ids."""


class CallSeries:
    """The counters of one operation, several times faster than an observer.

    Attributes:
        times_all: Whether all calls are timed, or only those from entry points.
        started: Calls that started.
        untimed: Calls that succeeded and were not timed.
        codes: Other calls that ended, by error code; an empty code is success.
        changes: Values of results that normalisation changed, by kind.
        items: Items of subscriptions.
        abandoned: Handlers that were still running after their call had ended.
        retries: Attempts of a call after the first.
        seconds: Total duration of the timed calls that ended.
        buckets: Timed calls by duration; see `BUCKETS`.
    """

    __slots__ = (
        "abandoned",
        "buckets",
        "changes",
        "codes",
        "items",
        "retries",
        "seconds",
        "started",
        "times_all",
        "untimed",
    )

    def __init__(self, *, times_all: bool) -> None:
        self.times_all = times_all
        self.started = 0
        self.untimed = 0
        self.codes: dict[str, int] = {}
        self.changes: dict[str, int] = {}
        self.items = 0
        self.abandoned = 0
        self.retries = 0
        self.seconds = 0.0
        self.buckets = [0] * (len(BUCKETS) + 1)

    def finish(self, code: str | None, seconds: float | None) -> None:
        """Count the end of a call; its duration is None if it was not timed."""
        name = code or ""
        self.codes[name] = self.codes.get(name, 0) + 1
        if seconds is not None:
            self.seconds += seconds
            self.buckets[bisect_left(BUCKETS, seconds)] += 1

    def add_changes(self, changes: dict[str, int] | None) -> None:
        """Count the changes of a result, by kind."""
        if changes is not None:
            add_counts(self.changes, changes)

    @property
    def running(self) -> int:
        """Calls that have not ended."""
        return self.started - self.untimed - sum(self.codes.values())


class CallCounters:
    """Counts the calls of a registry.

    Args:
        known: The operations that are counted by name.
    """

    def __init__(self, known: Container[str]) -> None:
        self._known = known
        self._series: dict[str, CallSeries] = {}
        self._times_all = False

    @property
    def times_all(self) -> bool:
        """Whether calls from code in this process are timed, and not only those from entry points."""
        return self._times_all

    @times_all.setter
    def times_all(self, value: bool) -> None:
        self._times_all = value
        for series in self._series.values():
            series.times_all = value

    def of(self, operation_id: str) -> CallSeries:
        """Return the counters of an operation."""
        series = self._series.get(operation_id)
        if series is None:
            name = operation_id if operation_id in self._known else UNKNOWN
            series = self._series.setdefault(name, CallSeries(times_all=self._times_all))
        return series

    def __iter__(self) -> Iterator[tuple[str, CallSeries]]:
        return iter(sorted(self._series.items()))
