"""Follow calls: log lines, audit records and metrics here, OpenTelemetry in `otel` and `otlp`.

    registry.record(Audit())

Rule 1: an audit record names caller, operation, outcome, duration and id, never arguments or results.
Rule 2: metrics are labelled with operation ids and codes. Both are bounded: unregistered operations share one label,
        and so do the codes of an operation beyond a number.
Rule 3: each option is defined once, for Python and for config files.
"""

from operations.recorder.audit import Audit, AuditConfig, AuditFile, AuditRecord
from operations.recorder.logs import LogConfig, LogFormatter, logging_to_stderr
from operations.telemetry.config import TelemetryConfig
from operations.telemetry.metrics import CallMetrics

__all__ = [
    "Audit",
    "AuditConfig",
    "AuditFile",
    "AuditRecord",
    "CallMetrics",
    "LogConfig",
    "LogFormatter",
    "TelemetryConfig",
    "logging_to_stderr",
]
