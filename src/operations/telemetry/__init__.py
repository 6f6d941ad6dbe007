"""Following calls: metrics, audit, access log, OpenTelemetry."""
