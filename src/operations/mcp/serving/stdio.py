"""Serve MCP on standard input and output within limits.

Rule 1: a line is measured before it is decoded. A request beyond a limit gets an error; any other message beyond one is
        dropped.
Rule 2: meanwhile descriptor 0 is the null device, so that handlers and children of this process cannot take messages.
"""

import logging
import os
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, BinaryIO, Final, cast

import anyio.to_thread
from mcp.server.stdio import stdio_server
from mcp.shared.message import SessionMessage
from mcp_types import INTERNAL_ERROR, ErrorData, JSONRPCError

from operations.errors import CallError
from operations.front.limits import Limits
from operations.front.messages import enforce_size
from operations.front.public_errors import too_large

logger = logging.getLogger("operations")

_STDIN: Final = 0

# Nothing is nested before the id, so that it is the message's own.
_ID: Final = re.compile(rb'\s*\{[^\[{]{0,1000}?"id"\s*:\s*(?:(-?\d{1,18})|"([^"\\]{1,200})")')


@asynccontextmanager
async def bounded_stdio(limits: Limits) -> AsyncGenerator[tuple[Any, Any]]:
    """Yield the SDK's streams of standard input and output."""
    with _claimed_stdin() as file:
        lines = _Lines(file, limits)
        async with stdio_server(stdin=cast("Any", lines)) as (incoming, outgoing):
            lines.send = outgoing.send
            yield incoming, outgoing


@contextmanager
def _claimed_stdin() -> Generator[BinaryIO]:
    """Yield standard input as a file of its own, in whose place the null device stands."""
    file = os.fdopen(os.dup(_STDIN), "rb", closefd=False)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, _STDIN)
    os.close(null)
    try:
        yield file
    finally:
        # A thread may still read from it, so it is not closed.
        os.dup2(file.fileno(), _STDIN)


class _Lines:
    """The lines of a file that are within the limits, for the SDK's reader."""

    def __init__(self, file: BinaryIO, limits: Limits) -> None:
        self._file = file
        self._limits = limits
        self.send: Callable[[SessionMessage], Awaitable[None]] | None = None

    async def __aiter__(self) -> AsyncGenerator[str]:
        while True:
            line, error = await anyio.to_thread.run_sync(self._read, abandon_on_cancel=True)
            if error is not None:
                await self._reject(line, error)
            elif line:
                yield line.decode(errors="replace")
            else:
                return

    def _read(self) -> tuple[bytes, CallError | None]:
        """Return the next line and its fault, if any; of a line that is too long, the beginning."""
        most = self._limits.body_bytes
        line = self._file.readline(most + 1)
        if len(line) > most and not line.endswith(b"\n"):
            while (rest := self._file.readline(most)) and not rest.endswith(b"\n"):
                pass
            return line, too_large(f"The message is larger than {most} bytes")
        try:
            enforce_size(line, self._limits)
        except CallError as error:
            return line, error
        return line, None

    async def _reject(self, line: bytes, error: CallError) -> None:
        found = _ID.match(line)
        if found is None or self.send is None:
            logger.warning("dropped an MCP message: %s", error.message)
            return
        number, text = found.groups()
        request_id = int(number) if number is not None else text.decode(errors="replace")
        data = ErrorData(code=INTERNAL_ERROR, message=error.message, data=error.to_wire())
        await self.send(SessionMessage(JSONRPCError(jsonrpc="2.0", id=request_id, error=data)))
