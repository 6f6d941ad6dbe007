"""Run a server as a child process, with one JSON-RPC message per line on its stdin and stdout.

Rule 1: a line that is too long or not a message affects only the call that it responds to; reading continues with the
        next line. At most one line is in memory; for a line that is too long, only its beginning and end, where the
        request id may be.
Rule 2: disconnecting stops the child and its own children: stdin is closed, then SIGTERM and SIGKILL follow, each with
        a time limit.
Rule 3: children end with this process, even if it is killed: one small guard process per application watches a pipe
        that closes when this process dies (`kill_orphans`). The guard runs while there are children.
"""

import asyncio
import logging
import os
import re
import signal
from asyncio.subprocess import PIPE, Process, SubprocessStreamProtocol
from codecs import BOM_UTF8
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, cast

import anyio
import msgspec
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from mcp.client.stdio import get_default_environment
from mcp.shared.message import SessionMessage
from mcp_types import JSONRPCError, JSONRPCRequest

from operations.base.json.decoding import enforce_bounds
from operations.base.json.values import MAX_DOCUMENT_DEPTH, JSONLimitError
from operations.io.child import guard_group, release_group
from operations.mcp.config import MCPClientConfig
from operations.mcp.shared.failures import EDGE, Kind, answered_id, id_at_edge, seal
from operations.mcp.shared.repairs import read_message, repaired

# ------------------------------------------------------------ lines


@dataclass(frozen=True, slots=True)
class Oversized:
    """A line that exceeds the size limit."""

    size: int
    head: bytes
    tail: bytes


class LineBuffer:
    """Splits chunks into lines without their line ends."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._line = bytearray()
        self._size = 0

    def feed(self, chunk: bytes) -> Iterator[bytes | Oversized]:
        """Return the lines that `chunk` completes."""
        *ends, rest = chunk.split(b"\n")
        for part in ends:
            self._add(part)
            yield self._take()
        self._add(rest)

    def rest(self) -> Iterator[bytes | Oversized]:
        """Return the incomplete last line, if there is one."""
        if self._size:
            yield self._take()

    def _add(self, part: bytes) -> None:
        self._line += part
        self._size += len(part)
        if self._size > self._limit:
            # The request id may be at the beginning or at the end.
            del self._line[EDGE:-EDGE]

    def _take(self) -> bytes | Oversized:
        line, size = bytes(self._line), self._size
        self._line.clear()
        self._size = 0
        if size > self._limit:
            return Oversized(size, line[:EDGE], line[-EDGE:])
        return line.rstrip(b"\r")


# ------------------------------------------------------------ children of a killed process

logger = logging.getLogger("operations.mcp")


# ------------------------------------------------------------ child processes

Incoming = MemoryObjectSendStream[SessionMessage | Exception]
Outgoing = MemoryObjectReceiveStream[SessionMessage]
Streams = tuple[
    MemoryObjectReceiveStream[SessionMessage | Exception], MemoryObjectSendStream[SessionMessage]
]

_TERMINATE_SECONDS = 1.0
"""Seconds between SIGTERM and SIGKILL."""

_KILL_SECONDS = 2.0
"""Seconds for the event loop to notice that a killed process has ended."""

_DRAIN_SECONDS = 0.02
"""Seconds between the end of a child's stdout and the end of the connection."""

_STDERR_SECONDS = 0.2
"""Seconds to read the stderr of a dead child, which its own children may keep open."""

_CHUNK = 64 * 1024
"""The largest number of bytes per read from a pipe; reading pauses while twice as many are unprocessed."""

_STDERR_CHUNK = 256
"""The largest number of bytes of stderr that are processed at once."""

_STDERR_LINES = 20
_COMPLAINTS = 5
"""The number of unreadable lines of one process that are logged."""

_COMPLAINT = 120
"""The number of characters of an unreadable line that are logged."""

_GONE = (anyio.ClosedResourceError, anyio.BrokenResourceError, anyio.EndOfStream, OSError)


class Child:
    """The state of a server's process, also after it has ended."""

    def __init__(self, name: str, redact: Callable[[str], str]) -> None:
        self.name = name
        self.process: Process | None = None
        self.stderr: deque[str] = deque(maxlen=_STDERR_LINES)
        """The last lines of its stderr, with secrets redacted."""

        self.stray: list[str] = []
        """The beginnings of the first lines on its stdout that were not messages, with secrets redacted."""

        self.is_stopped = False
        self.went_away = False
        """Whether the process closed its output before it was stopped."""
        self.is_heard = anyio.Event()
        """Set when its stderr has ended."""

        self.has_exited = anyio.Event()
        """Set when the process has exited. Processes that it started may still hold its pipes."""

        self._redact = redact

    @property
    def exit_code(self) -> int | None:
        """The exit code if the process ended by itself; None if it runs, never started, or was stopped by us."""
        return self.process.returncode if self.process is not None and self.went_away else None

    @property
    def facts(self) -> list[tuple[str, str]]:
        """The exit code and output of the process, for a report."""
        code = [] if self.exit_code is None else [("exit code", str(self.exit_code))]
        printed = [("printed", line) for line in self.stray]
        return [*code, *printed, *(("output", line) for line in self.stderr)]

    def complain(self, problem: str, line: bytes) -> None:
        """Log the beginning of an unreadable line; only the first few lines are logged."""
        if len(self.stray) < _COMPLAINTS:
            self.stray.append(self._shown(line)[:_COMPLAINT])
            logger.warning("%s printed %s, ignored: %s", self.name, problem, self.stray[-1])

    def log_output(self, line: bytes | Oversized) -> None:
        """Store and log a line of its stderr."""
        shown = self._shown(line.head if isinstance(line, Oversized) else line)
        self.stderr.append(shown)
        logger.debug("%s: %s", self.name, shown)

    def _shown(self, line: bytes) -> str:
        return ascii(self._redact(line.decode("utf-8", "replace").rstrip()))[1:-1]


class _Protocol(SubprocessStreamProtocol):
    """Reports the exit of the process, which asyncio reports only after its pipes are closed."""

    def __init__(self, child: Child, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(limit=_CHUNK, loop=loop)
        self._child = child

    def process_exited(self) -> None:
        super().process_exited()
        self._child.has_exited.set()


@asynccontextmanager
async def open_stdio(config: MCPClientConfig, child: Child) -> AsyncGenerator[Streams]:
    """Start the server and yield its two streams.

    Raises:
        OSError: If it cannot be started.
    """
    loop = asyncio.get_running_loop()
    # Like `asyncio.create_subprocess_exec`, which does not return the transport that `_stop` has to close.
    starting = asyncio.Task(
        loop.subprocess_exec(
            lambda: _Protocol(child, loop),
            cast("str", config.command),
            *config.args,
            stdin=PIPE,
            stdout=PIPE,
            stderr=PIPE,
            env=get_default_environment() | dict(config.env),
            cwd=config.cwd,
            start_new_session=True,
        )
    )
    # Shielded, because the repeated cancellation of a cancel scope would leave the process and its pipes open.
    with anyio.CancelScope(shield=True):
        await starting
    transport, protocol = starting.result()
    process = Process(transport, protocol, loop)
    # No await until the task group: a cancellation in between would leave the child running.
    child.process = process
    guard_group(process.pid)
    incoming, read_stream = anyio.create_memory_object_stream[SessionMessage | Exception](0)
    write_stream, outgoing = anyio.create_memory_object_stream[SessionMessage](0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_read, process, config, incoming, child)
        tasks.start_soon(_write, process, outgoing, incoming)
        tasks.start_soon(_read_stderr, process, child)
        try:
            yield read_stream, write_stream
        finally:
            child.is_stopped = True
            with anyio.CancelScope(shield=True):
                for stream in (read_stream, write_stream):
                    stream.close()
                await _stop(process, transport, config.shutdown_timeout, child)
                release_group(process.pid)
            tasks.cancel_scope.cancel()


# ------------------------------------------------------------ messages


async def _read(
    process: Process, config: MCPClientConfig, incoming: Incoming, child: Child
) -> None:
    """Read messages until stdout ends, even after the end of the session, so that the child can exit."""
    assert process.stdout is not None  # noqa: S101 - asked for
    lines = LineBuffer(config.max_message_bytes)
    with suppress(*_GONE):
        async with incoming:
            while chunk := await process.stdout.read(_CHUNK):
                for line in _combined(lines.feed(chunk)):
                    async for message in _messages(line, config, child):
                        await _deliver(message, incoming)
            for line in lines.rest():
                text = line.head if isinstance(line, Oversized) else line
                child.complain("a line without an end", text)
            child.went_away = not child.is_stopped
            # A request that is being written then fails and is safe to retry: its failure must be delivered before the
            # end of the connection.
            await anyio.sleep(_DRAIN_SECONDS)


async def _deliver(message: SessionMessage | None, incoming: Incoming) -> None:
    """Pass a message to the session; None, and messages after its end, are dropped."""
    with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):
        if message is not None:
            await incoming.send(message)
            return
    # A flood of lines without a message must not block other tasks.
    await asyncio.sleep(0)


_CHANGED = re.compile(rb'"notifications/(?:\w+/list_changed|resources/updated)"')


def _combined(lines: Iterator[bytes | Oversized]) -> Iterator[bytes | Oversized]:
    """Yield lines; of equal notifications of a change with no other line in between, only the first.

    The SDK takes a quarter of a millisecond for each, which would delay the calls that wait behind a flood of them.
    """
    changes: set[bytes] = set()
    for line in lines:
        if isinstance(line, bytes) and len(line) <= EDGE and _CHANGED.search(line):
            if line in changes:
                continue
            changes.add(line)
        else:
            changes.clear()
        yield line


async def _messages(
    line: bytes | Oversized, config: MCPClientConfig, child: Child
) -> AsyncGenerator[SessionMessage | None]:
    """Return the messages in a line: usually one, or a batch (2025-03-26). None stands for a part without a message."""
    if isinstance(line, Oversized):
        child.complain(f"a message of {line.size} bytes", line.head)
        message = f"answered with more than {config.max_message_bytes} bytes"
        request_id = id_at_edge(line.head, line.tail)
        yield _failed(request_id, "too_large", message, size=line.size)
        return
    line = line.removeprefix(BOM_UTF8).strip()
    if not line:
        yield None
        return
    try:
        enforce_bounds(line, max_values=config.max_message_values, max_depth=MAX_DOCUMENT_DEPTH)
    except JSONLimitError as error:
        child.complain(f"a message that {error.reason}", line[:_COMPLAINT])
        message = f"answered with a message that {error.reason}"
        yield _failed(answered_id(line), "too_large", message, size=len(line))
        return
    for part in _batch(line) if line.startswith(b"[") else (line,):
        yield await _message(part, child)


def _batch(line: bytes) -> list[bytes]:
    try:
        return [bytes(part) for part in msgspec.json.decode(line, type=list[msgspec.Raw])]
    except (msgspec.DecodeError, RecursionError):
        return [line]


async def _message(line: bytes, child: Child) -> SessionMessage | None:
    try:
        return _decoded(line)
    except ValueError:
        with suppress(ValueError):
            return _decoded(await repaired(line))
        child.complain("a line that is not a message", line)
    return _failed(
        answered_id(line), "malformed", "sent a response that the protocol does not allow"
    )


def _decoded(line: bytes) -> SessionMessage:
    return SessionMessage(read_message(line))


def _failed(request_id: Any, kind: Kind, message: str, **details: Any) -> SessionMessage | None:
    if request_id is None:
        return None
    error = {"jsonrpc": "2.0", "id": request_id, "error": seal(kind, message, **details)}
    return SessionMessage(JSONRPCError.model_validate(error))


async def _write(process: Process, outgoing: Outgoing, incoming: Incoming) -> None:
    """Write messages as lines.

    If a message cannot be written, its caller receives an error, because it was not sent.
    """
    async with outgoing:
        async for message in outgoing:
            body = message.message
            line = body.model_dump_json(by_alias=True, exclude_unset=True).encode() + b"\n"
            try:
                await _send(process, line)
            except (*_GONE, RuntimeError):
                with suppress(anyio.ClosedResourceError, anyio.BrokenResourceError):
                    if isinstance(body, JSONRPCRequest):
                        failed = _failed(body.id, "closed", "is not running")
                        await incoming.send(cast("SessionMessage", failed))
                    await incoming.aclose()
                return


async def _send(process: Process, line: bytes) -> None:
    """Write a line.

    Raises:
        OSError: If the child has closed its stdin. asyncio would report this only with the next line.
    """
    writer = process.stdin
    assert writer is not None  # noqa: S101 - asked for
    writer.write(line)
    if writer.is_closing():
        raise BrokenPipeError
    await writer.drain()


async def _read_stderr(process: Process, child: Child) -> None:
    """Write the child's stderr to the log, and store its last lines for error reports."""
    assert process.stderr is not None  # noqa: S101 - asked for
    lines = LineBuffer(4096)
    try:
        with suppress(*_GONE):
            while chunk := await process.stderr.read(_STDERR_CHUNK):
                for line in lines.feed(chunk):
                    child.log_output(line)
                # A flood of output must not block other tasks.
                await asyncio.sleep(0)
        for line in lines.rest():
            child.log_output(line)
    finally:
        child.is_heard.set()


# ------------------------------------------------------------ the end


async def _stop(
    process: Process, transport: asyncio.SubprocessTransport, grace: float, child: Child
) -> None:
    """End the child, then all processes that it started."""
    assert process.stdin is not None  # noqa: S101 - asked for
    process.stdin.close()
    if not await _ended(child, grace):
        _signal(process, signal.SIGTERM)
        await _ended(child, _TERMINATE_SECONDS)
    _signal(process, signal.SIGKILL)
    if not await _ended(child, _KILL_SECONDS):
        logger.warning("process %d did not end after SIGKILL", process.pid)
    with anyio.move_on_after(_STDERR_SECONDS):
        await child.is_heard.wait()
    # Another process may hold the other end of a pipe, which keeps the transport open.
    transport.close()


def _signal(process: Process, number: signal.Signals) -> None:
    """Send a signal to the process group of the child, which it leads because it was started in a new session."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


async def _ended(child: Child, seconds: float) -> bool:
    """Return whether the process exits in time; `Process.wait` also waits for pipes that other processes may hold."""
    with anyio.move_on_after(seconds):
        await child.has_exited.wait()
    return child.has_exited.is_set()
