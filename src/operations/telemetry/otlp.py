"""Send the spans and metrics of a registry's calls to an OpenTelemetry collector (OTLP over HTTP).

    with exporting(registry, endpoint="http://127.0.0.1:4318"):
        ...

This needs the `otlp` extra; `operations.telemetry.otel` needs only the API of OpenTelemetry.
"""

import logging
from collections.abc import Generator
from contextlib import contextmanager
from threading import Thread

from operations.base.errors import MissingExtraError
from operations.base.logs import LogThrottle
from operations.base.types import options_of
from operations.registry.registry import OperationRegistry
from operations.telemetry.config import TelemetryConfig
from operations.telemetry.otel import instrument

try:
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
except ModuleNotFoundError as error:
    raise MissingExtraError("operations.telemetry.otlp", extra="otlp") from error


class _OncePerMinute(logging.Filter):
    """Limits the log while the collector is unavailable: the exporters log several lines for each attempt."""

    def __init__(self) -> None:
        super().__init__()
        self._throttle = LogThrottle()

    def filter(self, record: logging.LogRecord) -> bool:
        return self._throttle.level() == logging.WARNING


_EXPORTERS = [
    logging.getLogger(exporter.__module__) for exporter in (OTLPSpanExporter, OTLPMetricExporter)
]


@options_of(TelemetryConfig)
@contextmanager
def exporting(config: TelemetryConfig, registry: OperationRegistry) -> Generator[None]:
    """Send the telemetry of a registry to a collector for the duration of a `with` block.

    The options are the fields of `TelemetryConfig`. Leaving the block sends the remaining data, which may take
    `timeout` seconds.
    """
    if config.endpoint is None:
        yield
        return
    base, headers = config.endpoint.rstrip("/"), dict(config.headers)
    resource = Resource.create({"service.name": config.service_name})
    tracers, readers = TracerProvider(resource=resource), list[PeriodicExportingMetricReader]()
    if config.traces:
        spans = OTLPSpanExporter(f"{base}/v1/traces", headers=headers, timeout=config.timeout)
        tracers.add_span_processor(BatchSpanProcessor(spans))
    if config.metrics:
        exporter = OTLPMetricExporter(f"{base}/v1/metrics", headers=headers, timeout=config.timeout)
        readers.append(PeriodicExportingMetricReader(exporter, config.interval * 1000))
    meters = MeterProvider(readers, resource=resource)
    stop = instrument(registry, tracer_provider=tracers, meter_provider=meters)
    outages = _OncePerMinute()
    for exporters in _EXPORTERS:
        exporters.addFilter(outages)
    try:
        yield
    finally:
        stop()
        # Both at once, so that a collector that does not respond delays the exit only once.
        flushing = Thread(target=tracers.shutdown)
        flushing.start()
        meters.shutdown(timeout_millis=config.timeout * 1000)
        flushing.join()
        for exporters in _EXPORTERS:
            exporters.removeFilter(outages)
