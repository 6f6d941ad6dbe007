"""Follow calls: metrics, audit records, the access log, OpenTelemetry.

The options are here, each described once: for Python and for config files.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from operations.types import Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """How log records are written to standard error."""

    level: Literal["debug", "info", "warning", "error"] = "warning"
    """The lowest level that is written."""

    json: bool = False
    """Write one JSON object per line, for programs that collect logs."""

    timestamps: bool = False
    """Begin each line with the time, in UTC; lines of JSON always have one."""

    requests: bool = False
    """Write a line for every HTTP request, and for every call of a worker with its operation, duration and time in the
    queue (the logger `operations.access`), at every level."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditConfig:
    """Records of every call: who, what, outcome, duration and id, never arguments or results."""

    enabled: bool = False
    """Keep records."""

    file: str | Path | None = None
    """Append them to this file, one JSON object per line; without it they go to the logger `operations.audit`. The file
    is opened again when it was moved, as log rotation does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetryConfig:
    """Traces and metrics that are sent to an OpenTelemetry collector."""

    endpoint: str | None = None
    """The address of the collector for OTLP over HTTP, such as `http://127.0.0.1:4318`; without it nothing is sent."""

    headers: Mapping[str, str] = field(default_factory=dict[str, str], repr=False)
    """Sent with every export, such as an API key."""

    service_name: str = "operations"
    """The name of this service in traces and metrics."""

    traces: bool = True
    """Send a span for every call."""

    metrics: bool = True
    """Send the number and duration of calls."""

    interval: Seconds = 60
    """Seconds between two exports of metrics."""

    timeout: Seconds = 10
    """Seconds for one export."""

    def __post_init__(self) -> None:
        if self.endpoint is not None and not self.endpoint.startswith(("http://", "https://")):
            raise ValueError("endpoint must begin with http:// or https://")
