"""Send the spans and metrics of a registry's calls to an OpenTelemetry collector (OTLP over HTTP).

    with exporting(registry, endpoint="http://127.0.0.1:4318"):
        ...

This needs the `otlp` extra; `operations.telemetry.otel` needs only the API of OpenTelemetry.
"""

import logging
import socket
from collections.abc import Generator
from contextlib import contextmanager
from threading import Thread
from urllib.parse import urlsplit

from operations.base.errors import MissingExtraError
from operations.base.logs import LogThrottle
from operations.base.text import printable, without_secrets
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


logger = logging.getLogger("operations.telemetry")


class _OncePerMinute(logging.Filter):
    """Limits the log while the collector is unavailable: the exporters log several lines for each attempt."""

    def __init__(self) -> None:
        super().__init__()
        self._throttle = LogThrottle()
        self.is_silent = False

    def filter(self, record: logging.LogRecord) -> bool:
        return not self.is_silent and self._throttle.level() == logging.WARNING


_LOGS = [
    logging.getLogger(exporter.__module__) for exporter in (OTLPSpanExporter, OTLPMetricExporter)
]


@options_of(TelemetryConfig)
@contextmanager
def exporting(config: TelemetryConfig, registry: OperationRegistry) -> Generator[None]:
    """Send the telemetry of a registry to a collector for the duration of a `with` block.

    The options are the fields of `TelemetryConfig`. Leaving the block sends the remaining data, which may take
    `timeout` seconds, unless nothing accepts connections at the address: then the data is dropped at once.
    """
    if config.endpoint is None:
        yield
        return
    base, headers = config.endpoint.rstrip("/"), dict(config.headers)
    resource = Resource.create({"service.name": config.service_name})
    tracers, readers = TracerProvider(resource=resource), list[PeriodicExportingMetricReader]()
    exporters = list[OTLPSpanExporter | OTLPMetricExporter]()
    if config.traces:
        spans = OTLPSpanExporter(f"{base}/v1/traces", headers=headers, timeout=config.timeout)
        exporters.append(spans)
        tracers.add_span_processor(BatchSpanProcessor(spans))
    if config.metrics:
        exporter = OTLPMetricExporter(f"{base}/v1/metrics", headers=headers, timeout=config.timeout)
        exporters.append(exporter)
        readers.append(PeriodicExportingMetricReader(exporter, config.interval * 1000))
    meters = MeterProvider(readers, resource=resource)
    stop = instrument(registry, tracer_provider=tracers, meter_provider=meters)
    outages = _OncePerMinute()
    for log in _LOGS:
        log.addFilter(outages)
    try:
        yield
    finally:
        stop()
        if not _accepts_connections(base):
            # An exporter would repeat its request until `timeout`. Without it, the last data is dropped.
            logger.warning(
                "no collector at %s: the last telemetry is not sent",
                printable(without_secrets(base)),
            )
            outages.is_silent = True
            for each in exporters:
                each.shutdown()  # pyright: ignore[reportUnknownMemberType]
        # Both at once, so that a collector that does not respond delays the exit only once.
        flushing = Thread(target=tracers.shutdown)
        flushing.start()
        meters.shutdown(timeout_millis=config.timeout * 1000)
        flushing.join()
        for log in _LOGS:
            log.removeFilter(outages)


_LOOK_SECONDS = 1.0


def _accepts_connections(base: str) -> bool:
    """Return whether a program accepts connections at an address."""
    parts = urlsplit(base)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        with socket.create_connection((parts.hostname or "", port), timeout=_LOOK_SECONDS):
            return True
    except OSError:
        return False
