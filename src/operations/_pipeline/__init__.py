"""The path of a call, shared by all entry points.

    access -> validate -> access to the input -> handler -> detect | wrap -> normalise -> check

Rule 1: each step is implemented only here. `invoke` and `stream` differ only in the call of the handler.
Rule 2: every failure becomes exactly one `CallError`; only `KeyboardInterrupt`, `SystemExit` and the
        caller's own cancellation pass through.
Rule 3: every change is reported. Changes and mismatches of a result are logged with their paths.
Rule 4: this package does not depend on transports, HTTP or MCP.

`plan` prepares an operation for calls, `path` runs it and turns its result into an envelope, `streams` does the same
for
subscriptions, `reports` notifies observers, counters, ledger and log, and `lenient` converts input.
"""
