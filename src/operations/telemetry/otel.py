"""Record calls as OpenTelemetry spans and metrics.

    stop = instrument(registry)

Rule 1: the span of a nested call is a child of the span of its parent call. Any other call is a child of the current
        span, unless the `traceparent` in its metadata, which every entry point sets, continues another trace.
Rule 2: while a handler runs, its span is the current span and is in its metadata, so that calls to other services can
        propagate the trace without OpenTelemetry.
Rule 3: a call that is forwarded to a worker, an HTTP API or an MCP server has an additional `CLIENT` span inside the
        span of the local call.
Rule 4: each attempt of a run is a trace of its own, with a link to the span of the call that has started the run.
Rule 5: no argument, result or message becomes an attribute.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator
from contextlib import AbstractContextManager, aclosing, contextmanager
from dataclasses import replace
from typing import Any, cast

from operations.base.errors import MissingExtraError, map_error
from operations.contract.envelopes import ResponseEnvelope
from operations.contract.events import CallFinished, CallStarted, CallYielded, RunEnded
from operations.recorder.recorder import Begin, Digest, End, Note
from operations.registry.counters import BUCKETS
from operations.registry.middleware import Call, Next, NextStream
from operations.registry.registry import OperationRegistry
from operations.registry.reports import code_of_end

try:
    from opentelemetry import context as contexts
    from opentelemetry import metrics, trace
    from opentelemetry.context import Context
    from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ModuleNotFoundError as error:
    raise MissingExtraError("operations.telemetry.otel", extra="otel") from error

_NAME = "operations"
_ROOT = "."
"""The step that is the call of a run itself."""

_W3C = TraceContextTextMapPropagator()


def instrument(
    registry: OperationRegistry,
    *,
    tracer_provider: trace.TracerProvider | None = None,
    meter_provider: metrics.MeterProvider | None = None,
) -> Callable[[], None]:
    """Record spans and metrics of a registry's calls; return a function that stops the recording.

    Args:
        registry: The registry.
        tracer_provider: Used instead of the global tracer provider.
        meter_provider: Used instead of the global meter provider.
    """
    spans = Spans(
        registry,
        trace.get_tracer(_NAME, tracer_provider=tracer_provider),
        metrics.get_meter(_NAME, meter_provider=meter_provider),
    )
    middleware = registry.use(spans.around), registry.use(spans.around_stream)
    unobserve = registry.record(spans)

    def stop() -> None:
        unobserve()
        for each in middleware:
            registry.remove_middleware(each)

    return stop


class Spans:
    """The sink and the two middlewares, which share the spans of running calls."""

    wants, strict = frozenset({"started", "yielded", "finished", "run.ended"}), False

    def __init__(
        self, registry: OperationRegistry, tracer: trace.Tracer, meter: metrics.Meter
    ) -> None:
        self._registry = registry
        self._tracer = tracer
        self._open: dict[str, Span] = {}
        # The default buckets are for milliseconds.
        seconds: Any = {"unit": "s", "explicit_bucket_boundaries_advisory": BUCKETS}
        self._duration = meter.create_histogram(
            "operations.call.duration", description="How long calls took.", **seconds
        )
        self._running = meter.create_up_down_counter(
            "operations.call.running", description="Running calls."
        )
        self._ended = meter.create_counter("operations.run.ended", description="Runs that ended.")
        self._queued = meter.create_histogram(
            "operations.queue.duration",
            description="How long calls waited for a worker before they began.",
            **seconds,
        )

    def open(self) -> None:
        """Do nothing: the providers are open already."""

    def check(self) -> bool:
        """Return True: the providers log what they cannot send."""
        return True

    def close(self) -> None:
        """Do nothing: the providers belong to the caller."""

    def begin(self, call: Begin, digest: Digest | None) -> None:
        """Open a span when a call arrives."""
        if isinstance(call, CallStarted):
            self._start(call)

    def end(self, call: End) -> None:
        """Close the span of a call."""
        if isinstance(call, CallFinished):
            self._finish(call)

    def note(self, event: Note) -> None:
        """Count runs that ended, and record items."""
        if isinstance(event, RunEnded):
            self._ended.add(
                1,
                {
                    "operations.operation.id": event.operation_id,
                    "operations.run.status": event.status,
                },
            )
        elif isinstance(event, CallYielded) and event.request_id in self._open:
            self._open[event.request_id].add_event("item", {"operations.item": event.index})

    def _start(self, event: CallStarted) -> None:
        parent = self._open.get(event.parent_request_id or "")
        attributes: dict[str, str | float] = {
            "operations.operation.id": event.operation_id,
            "operations.request.id": event.request_id,
        }
        # A nested call did not wait in a queue.
        if event.queued is not None and parent is None:
            attributes["operations.queue.seconds"] = event.queued
            self._queued.record(event.queued, {"operations.operation.id": event.operation_id})
        if event.identity_id is not None:
            attributes["enduser.id"] = event.identity_id
        context, links = _context_of(event, parent), None
        if event.run is not None:
            attributes["operations.run.id"] = event.run
            if event.step == _ROOT and event.attempt is not None:
                attributes["operations.run.attempt"] = event.attempt
                # An attempt may begin hours after the call that has started the run.
                started_by = trace.get_current_span(context).get_span_context()
                links = [Link(started_by)] if started_by.is_valid else None
                context = Context()
        outer = trace.get_current_span(context).get_span_context()
        is_inside = outer.is_valid and not outer.is_remote
        self._open[event.request_id] = self._tracer.start_span(
            event.operation_id,
            context=context,
            kind=SpanKind.INTERNAL if is_inside else SpanKind.SERVER,
            attributes=attributes,
            links=links,
        )
        self._running.add(1, {"operations.operation.id": event.operation_id})

    def _finish(self, event: CallFinished) -> None:
        labels = {"operations.operation.id": event.operation_id}
        self._running.add(-1, labels)
        self._duration.record(event.duration, {**labels, "operations.code": event.code or "ok"})
        span = self._open.pop(event.request_id, None)
        if span is None:
            return
        if event.code is not None:
            _mark_failed(span, event.code)
        span.end()

    async def around(self, call: Call, next: Next) -> ResponseEnvelope[Any]:
        """Run a query or mutation with its span as the current span."""
        span = self._open.get(call.context.request_id)
        if span is None:
            return await next(call)
        with self._client_span(call, span) as current, _current(current):
            return await next(_carrying(call, current))

    def _is_passed_on(self, call: Call) -> bool:
        known = self._registry.get(call.spec.id)
        return known is None or known.forwards or call.spec.meta.get("source") == "mcp"

    @contextmanager
    def _client_span(self, call: Call, span: Span) -> Generator[Span]:
        """Yield a client span inside `span` for a call that another process runs; `span` itself for a local call."""
        if not self._is_passed_on(call):
            yield span
            return
        span = self._tracer.start_span(
            call.spec.id,
            trace.set_span_in_context(span),
            kind=SpanKind.CLIENT,
            attributes={"operations.operation.id": call.spec.id},
        )
        try:
            yield span
        except asyncio.CancelledError:
            _mark_failed(span, code_of_end(call.context))
            raise
        except Exception as error:
            _mark_failed(span, map_error(error, call.spec.error_schemas).code)
            raise
        finally:
            span.end()

    async def around_stream(
        self, call: Call, next: NextStream
    ) -> AsyncIterator[ResponseEnvelope[Any]]:
        """Run a subscription; its span is the current span while its handler runs."""
        span = self._open.get(call.context.request_id)
        if span is None:
            async for envelope in next(call):
                yield envelope
            return
        with self._client_span(call, span) as current:
            async with (
                aclosing(cast("Any", next(_carrying(call, current)))) as items,
                aclosing(_steps(items, current)) as steps,
            ):
                async for envelope in steps:
                    yield envelope


async def _steps(items: Any, span: Span) -> AsyncGenerator[ResponseEnvelope[Any]]:
    """Yield items.

    The span is the current span while the handler runs, but not while the consumer processes an item.
    """
    while True:
        token = contexts.attach(trace.set_span_in_context(span))
        try:
            envelope = await anext(items)
        except StopAsyncIteration:
            return
        finally:
            contexts.detach(token)
        yield envelope


def _mark_failed(span: Span, code: str) -> None:
    # `error.type` is the name of the semantic conventions, which dashboards read.
    span.set_attributes({"operations.code": code, "error.type": code})
    span.set_status(Status(StatusCode.ERROR, code))


def _current(span: Span) -> AbstractContextManager[Span]:
    """Make a span the current span; its end and its errors are recorded elsewhere."""
    return trace.use_span(span, record_exception=False, set_status_on_exception=False)


def current_trace() -> dict[str, str]:
    """Return the trace context of the current span, for the `metadata` of a call."""
    carrier: dict[str, str] = {}
    _W3C.inject(carrier)
    return carrier


def _context_of(event: CallStarted, parent: Span | None) -> Context:
    """Return the context with the parent of a call's span."""
    if parent is not None:
        return trace.set_span_in_context(parent)
    current = contexts.get_current()
    if event.traceparent is None:
        return current
    sent = {"traceparent": event.traceparent, "tracestate": event.tracestate or ""}
    remote = _W3C.extract(sent, context=Context())
    # The current span already continues this trace if another library records requests as well.
    return current if _trace_id(current) == _trace_id(remote) else remote


def _trace_id(context: Context) -> int:
    return trace.get_current_span(context).get_span_context().trace_id


def _carrying(call: Call, span: Span) -> Call:
    """Return the call with its span in its metadata, so that the handler's requests propagate the trace."""
    carrier: dict[str, str] = {}
    _W3C.inject(carrier, trace.set_span_in_context(span))
    return replace(call, context=call.context.with_metadata(**carrier)) if carrier else call
