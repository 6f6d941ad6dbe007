"""The only path for requests from outside this process.

    identify -> admit (rate, concurrency, sizes) -> context (deadline, caller channel, trace)
             -> registry.execute | registry.subscribe -> public outcome

Every entry point (HTTP, MCP, WebSocket, workers, the command line) is a codec in front of these steps.

Rule 1: each rule is implemented only here; an entry point translates and decides nothing.
Rule 2: a step that rejects a request ends it: no later step runs.
Rule 3: nothing here depends on a web framework; requests are plain ASGI.
"""
