"""Where traces and metrics are sent."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from operations.base.types import Seconds


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
