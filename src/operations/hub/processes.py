"""Several processes that serve one hub."""

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from anyio import move_on_after

from operations.base.retry import Backoff
from operations.base.tasks import receives_signals, shutdown_event
from operations.hub.supervisor import FIRST_PAUSE, LONGEST_PAUSE

if TYPE_CHECKING:
    pass


logger = logging.getLogger("operations.hub")


# ------------------------------------------------------------ several processes

VARIABLE: Final = "OPERATIONS_PROCESS"
"""The environment variable with the inherited file descriptors: listening socket and channel to the first process."""

_READY, _RELOAD = b"r", b"h"
_ENDED = 1


@dataclass(frozen=True, slots=True)
class Process:
    """The socket and channel that a process inherits from the first one."""

    listener: socket.socket
    channel: socket.socket

    announces: bool
    """Whether this process reports readiness for all processes."""

    @classmethod
    def inherited(cls) -> "Process | None":
        """Return the inherited socket and channel; None if this process is the only one, or the first."""
        given = os.environ.pop(VARIABLE, "").split()
        if len(given) != 3:
            return None
        listener, channel = (socket.socket(fileno=int(each)) for each in given[:2])
        return cls(listener, channel, given[2] == "1")

    def is_ready(self, end: Callable[[], object]) -> None:
        """Report that this process is ready; call `end` when the first process has ended."""
        with suppress(OSError):
            self.channel.send(_READY)
        self.channel.setblocking(False)
        loop = asyncio.get_running_loop()

        def read() -> None:
            # The first process never sends data, so this is the end of the channel.
            with suppress(OSError):
                self.channel.recv(1)
            loop.remove_reader(self.channel)
            end()

        loop.add_reader(self.channel, read)

    def reload_all(self) -> None:
        """Make all processes read the config again."""
        with suppress(OSError):
            self.channel.send(_RELOAD)


async def supervise(
    arguments: Sequence[str], count: int, listener: socket.socket, grace: float
) -> int:
    """Run several processes of this program until SIGTERM or SIGINT; return the exit code.

    Args:
        arguments: The command-line arguments of each process.
        count: The number of processes.
        listener: The shared socket. It is closed first, so that no request waits for a process that is ending.
        grace: Seconds that the processes have to end before they are killed.
    """
    loop = asyncio.get_running_loop()
    processes = _Processes([sys.executable, "-m", "operations", *arguments], listener)
    with shutdown_event() as shutdown:
        if receives_signals():
            loop.add_signal_handler(signal.SIGHUP, processes.reload)
        tasks = [asyncio.Task(processes.keep(number)) for number in range(count)]
        stopping = asyncio.Task(shutdown.wait())
        try:
            ended, _ = await asyncio.wait({stopping, *tasks}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if receives_signals():
                loop.remove_signal_handler(signal.SIGHUP)
            stopping.cancel()
            listener.close()
            processes.stop()
            _, late = await asyncio.wait(tasks, timeout=grace)
            if late:
                processes.kill()
                await asyncio.wait(late)
    # If a process could not be started, its exit code gives the reason.
    codes = [task.result() for task in tasks if stopping in ended or task in ended]
    return next((abs(code) for code in codes if code), 0)


class _Processes:
    """The processes that serve."""

    def __init__(self, command: Sequence[str], listener: socket.socket) -> None:
        self._command = command
        self._listener = listener
        self._running: dict[asyncio.subprocess.Process, socket.socket] = {}
        """The running processes, with the channel to each."""
        self._ready: set[asyncio.subprocess.Process] = set()
        self._stopping = asyncio.Event()
        self._was_ready = False

    def reload(self) -> None:
        """Make all processes read the config again. A process that is starting reads it anyway; SIGHUP would end it."""
        self._signal(self._ready, signal.SIGHUP)

    def stop(self) -> None:
        """Make all processes finish their calls and end.

        This does not use a signal, because a second signal ends a process at once, and a service manager may already
        have sent one to all processes.
        """
        self._stopping.set()
        for channel in self._running.values():
            with suppress(OSError):
                channel.shutdown(socket.SHUT_RDWR)

    def kill(self) -> None:
        """End all processes at once."""
        self._signal(self._running, signal.SIGKILL)

    def _signal(
        self, processes: Iterable[asyncio.subprocess.Process], number: signal.Signals
    ) -> None:
        for process in processes:
            with suppress(ProcessLookupError):
                process.send_signal(number)

    async def keep(self, number: int) -> int:
        """Run one process and restart it when it ends; return the last exit code.

        If all processes end before any is ready, they are not restarted.
        """
        backoff = Backoff(FIRST_PAUSE, LONGEST_PAUSE)
        while True:
            try:
                code = await self._run(number, backoff)
            except OSError as error:
                # The machine may be out of memory or processes for a while.
                logger.warning("process %d cannot be started: %s", number, error)
                code = _ENDED
            if self._stopping.is_set():
                return code
            if not self._was_ready:
                return code or _ENDED
            logger.warning("process %d exited with code %d and is restarted", number, code)
            with move_on_after(backoff.pause()):
                await self._stopping.wait()
            if self._stopping.is_set():
                return 0

    async def _run(self, number: int, backoff: Backoff) -> int:
        """Start one process and wait for its end; return its exit code."""
        mine, theirs = socket.socketpair()
        descriptors = self._listener.fileno(), theirs.fileno()
        announces = int(number == 0 and not self._was_ready)
        with mine, theirs:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                env={**os.environ, VARIABLE: f"{descriptors[0]} {descriptors[1]} {announces}"},
                pass_fds=descriptors,
                # Only the first process receives Ctrl-C; it then ends the others in order.
                start_new_session=True,
            )
            theirs.close()
            self._running[process] = mine
            if self._stopping.is_set():
                self.stop()
            listening = asyncio.Task(self._listen(process, mine, backoff))
            try:
                return await process.wait()
            finally:
                del self._running[process]
                self._ready.discard(process)
                listening.cancel()
                await asyncio.wait({listening})

    async def _listen(
        self, process: asyncio.subprocess.Process, channel: socket.socket, backoff: Backoff
    ) -> None:
        """Read the reports of a process."""
        channel.setblocking(False)
        loop = asyncio.get_running_loop()
        with suppress(OSError):
            while report := await loop.sock_recv(channel, 1):
                if report == _READY:
                    self._was_ready = True
                    self._ready.add(process)
                    backoff.reset()
                else:
                    self.reload()
