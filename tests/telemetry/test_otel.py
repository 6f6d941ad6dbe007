import asyncio
from collections.abc import AsyncIterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Semaphore, Thread
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import HistogramDataPoint, InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from tests.limits import scaled
from tests.server.asgi import Client
from tests.servers import free_port

from operations import CallError, Identity, OperationContext, OperationRegistry
from operations.registry.counters import BUCKETS
from operations.server import create_app
from operations.telemetry.otel import instrument
from operations.telemetry.otlp import exporting

TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = f"00-{TRACE}-b7ad6b7169203331-01"


class Telemetry:
    def __init__(self, registry: OperationRegistry) -> None:
        self.exporter = InMemorySpanExporter()
        self.reader = InMemoryMetricReader()
        self.tracers = TracerProvider()
        self.tracers.add_span_processor(SimpleSpanProcessor(self.exporter))
        meters = MeterProvider([self.reader])
        self.stop = instrument(registry, tracer_provider=self.tracers, meter_provider=meters)

    def spans(self) -> dict[str, ReadableSpan]:
        return {span.name: span for span in self.exporter.get_finished_spans()}


def build(registry: OperationRegistry) -> list[Any]:
    seen: list[Any] = []

    @registry.operation("test.inner")
    async def inner(context: OperationContext) -> None:
        seen.append((trace.get_current_span().get_span_context().span_id, context.metadata))

    @registry.operation("test.outer")
    async def outer(context: OperationContext, fail: bool = False) -> None:
        await asyncio.create_task(context.env.call("test.inner"))
        if fail:
            raise CallError("GONE", "CANARY")

    @registry.operation("test.items")
    async def items(context: OperationContext) -> AsyncIterator[int]:
        for number in range(3):
            seen.append(trace.get_current_span().get_span_context().span_id)
            yield number

    return seen


async def test_nested_calls_are_children_and_current_while_they_run(
    registry: OperationRegistry,
) -> None:
    telemetry, seen = Telemetry(registry), build(registry)

    await registry.execute("test.outer", {}, OperationContext(identity=Identity("alice")))

    outer, inner = telemetry.spans()["test.outer"], telemetry.spans()["test.inner"]
    assert outer.parent is None
    assert inner.parent is not None
    assert inner.context is not None
    assert outer.context is not None
    assert inner.parent.span_id == outer.context.span_id
    ((current, metadata),) = seen
    assert current == inner.context.span_id
    assert metadata["traceparent"].split("-")[2] == f"{inner.context.span_id:016x}"
    assert outer.attributes is not None
    assert outer.attributes["enduser.id"] == "alice"
    assert not trace.get_current_span().get_span_context().is_valid


async def test_a_trace_continues_through_the_http_server(registry: OperationRegistry) -> None:
    telemetry, seen = Telemetry(registry), build(registry)
    client = Client(create_app(registry))
    sent = {"traceparent": PARENT, "tracestate": "a=b"}

    assert (await client.post("/test/outer", headers=sent)).status == 200
    assert (
        await client.post("/call", json={"operation": "test.inner"}, headers=sent)
    ).status == 200
    assert (await client.get("/test/items", headers={"traceparent": "garbage"})).status == 200

    outer, items = telemetry.spans()["test.outer"], telemetry.spans()["test.items"]
    assert outer.context is not None
    assert outer.parent is not None
    assert f"{outer.context.trace_id:032x}" == TRACE
    assert f"{outer.parent.span_id:016x}" == "b7ad6b7169203331"
    assert outer.kind == SpanKind.SERVER
    assert outer.context.trace_state.to_header() == "a=b"
    assert items.parent is None
    assert all(m["traceparent"].startswith(f"00-{TRACE}") for _, m in seen[:2])
    assert seen[0][1]["tracestate"] == "a=b"


async def test_a_span_of_another_library_around_a_request_is_the_parent(
    registry: OperationRegistry,
) -> None:
    telemetry, _ = Telemetry(registry), build(registry)
    tracer = trace.get_tracer("asgi", tracer_provider=telemetry.tracers)

    class Traced:
        def __init__(self, app: Any) -> None:
            self._app = app

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            sent = {name.decode(): value.decode() for name, value in scope["headers"]}
            context = TraceContextTextMapPropagator().extract(sent)
            with tracer.start_as_current_span("POST", context, SpanKind.SERVER):
                await self._app(scope, receive, send)

    app = create_app(registry)
    app.add_middleware(Traced)
    assert (await Client(app).post("/test/outer", headers={"traceparent": PARENT})).status == 200

    request, outer = telemetry.spans()["POST"], telemetry.spans()["test.outer"]
    assert outer.parent == request.context
    # One request is one server span.
    assert (request.kind, outer.kind) == (SpanKind.SERVER, SpanKind.INTERNAL)


async def test_failures_and_items_are_recorded_without_their_content(
    registry: OperationRegistry,
) -> None:
    telemetry, seen = Telemetry(registry), build(registry)

    with pytest.raises(CallError):
        await registry.execute("test.outer", {"fail": True})
    async for _ in registry.subscribe("test.items"):
        assert not trace.get_current_span().get_span_context().is_valid

    failed, items = telemetry.spans()["test.outer"], telemetry.spans()["test.items"]
    assert failed.attributes is not None
    assert failed.attributes["operations.code"] == "GONE"
    assert failed.attributes["error.type"] == "GONE"
    assert items.attributes is not None
    assert "error.type" not in items.attributes
    assert not failed.status.is_ok
    assert "CANARY" not in failed.to_json()
    assert [event.name for event in items.events] == ["item"] * 3
    assert items.context is not None
    assert seen[1:] == [items.context.span_id] * 3


async def test_durations_are_measured_and_watching_can_stop(registry: OperationRegistry) -> None:
    telemetry, _ = Telemetry(registry), build(registry)
    await registry.execute("test.inner")

    data = telemetry.reader.get_metrics_data()
    assert data is not None
    found = {m.name: m for r in data.resource_metrics for s in r.scope_metrics for m in s.metrics}
    assert set(found) == {"operations.call.duration", "operations.call.running"}
    (point,) = found["operations.call.duration"].data.data_points
    assert isinstance(point, HistogramDataPoint)
    # The default buckets of OpenTelemetry are those of milliseconds: every call is in the first one.
    assert list(point.explicit_bounds) == list(BUCKETS)

    telemetry.stop()
    await registry.execute("test.inner")
    assert len(telemetry.exporter.get_finished_spans()) == 1
    # Nothing is left that slows down calls.
    assert (registry.middleware, registry.stream_middleware) == ((), ())


async def test_a_collector_that_does_not_respond_delays_the_exit_only_once(
    registry: OperationRegistry,
) -> None:
    build(registry)
    has_metrics, was_at_once = Event(), list[bool]()

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            if self.path == "/v1/metrics":
                has_metrics.set()
            else:
                # In turn, the metrics would come only after this response.
                was_at_once.append(has_metrics.wait(scaled(20)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        Thread(target=server.serve_forever).start()
        try:
            with exporting(registry, endpoint=f"http://127.0.0.1:{server.server_port}", timeout=60):
                await registry.execute("test.inner")
        finally:
            server.shutdown()

    assert was_at_once == [True]


async def test_the_log_is_short_while_a_collector_is_unavailable(
    registry: OperationRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    build(registry)
    attempts = Semaphore(0)

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_error(400)
            attempts.release()

        def log_message(self, format: str, *args: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        Thread(target=server.serve_forever).start()
        endpoint = f"http://127.0.0.1:{server.server_port}"
        try:
            with exporting(registry, endpoint=endpoint, interval=0.05):
                await registry.execute("test.inner")
                for _ in range(5):
                    assert await asyncio.to_thread(attempts.acquire, timeout=20)
        finally:
            server.shutdown()

    assert len(caplog.records) == 1


async def test_an_absent_collector_does_not_delay_the_exit(
    registry: OperationRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    build(registry)
    endpoint = f"http://127.0.0.1:{free_port()}"
    # A day, so that the test ends only if nothing waits for the collector.
    with exporting(registry, endpoint=endpoint, timeout=86_400):
        await registry.execute("test.inner")

    (record,) = caplog.records
    assert record.getMessage() == f"no collector at {endpoint}: the last telemetry is not sent"
