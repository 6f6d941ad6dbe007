"""The one path a call takes, whichever entry point it came through.

    access -> validate -> access to the input -> handler -> detect | wrap -> normalise -> check

Rule 1: a step exists only here. `invoke` and `stream` differ in the middle step alone.
Rule 2: every failure becomes exactly one `CallError`; only `KeyboardInterrupt`, `SystemExit` and the
        caller's own cancellation pass through.
Rule 3: nothing changes in silence. A result that had to be repaired, or still does not fit, is logged with paths.
Rule 4: nothing here knows about transports, HTTP or MCP servers.

`plan` makes an operation ready to run, `path` runs it and reports to observers, `streams` does so for subscriptions,
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
