"""The path of a call, shared by all entry points.

    access -> validate -> access to the input -> handler -> detect | wrap -> normalise -> check

Rule 1: each step is implemented only here. `invoke` and `stream` differ only in the call of the handler.
Rule 2: every failure becomes exactly one `CallError`; only `KeyboardInterrupt`, `SystemExit` and the
        caller's own cancellation pass through.
Rule 3: every change is reported. Changes and mismatches of a result are logged with their paths.
Rule 4: nothing here knows about transports, HTTP or MCP servers.

`plan` prepares an operation, `path` runs it and reports to observers, `streams` does so for subscriptions,
`outcome` turns results into envelopes, `lenient` converts input, `threads` runs `def` handlers.
"""

from operations._pipeline.path import authorize, invoke, report_refusal, run
from operations._pipeline.plan import (
    Call,
    Middleware,
    Next,
    NextStream,
    Plan,
    Remote,
    StreamMiddleware,
    forward,
    is_blocking,
)
from operations._pipeline.streams import Subscription, stream

__all__ = [
    "Call",
    "Middleware",
    "Next",
    "NextStream",
    "Plan",
    "Remote",
    "StreamMiddleware",
    "Subscription",
    "authorize",
    "forward",
    "invoke",
    "is_blocking",
    "report_refusal",
    "run",
    "stream",
]
