"""Serve a hub with several processes behind one listening socket.

Rule 1: the first process listens, starts the others, restarts those that end, and passes signals on. It serves nothing.
Rule 2: the others end when the first one does, however it ends.
Rule 3: everything in memory belongs to one process: connections, limits, rates, caches.
"""

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from operations._resilience import Backoff
from operations._signals import shutdown_event
from operations.hub.supervisor import FIRST_PAUSE, LONGEST_PAUSE

logger = logging.getLogger("operations.hub")

VARIABLE: Final = "OPERATIONS_PROCESS"
"""Tells a process which descriptors it inherited: the listening socket, and the channel to the first process."""

_READY, _RELOAD = b"r", b"h"
_ENDED = 1


@dataclass(frozen=True, slots=True)
class Process:
    """Settings that the other processes inherit from the first one."""

    listener: socket.socket
    channel: socket.socket

    announces: bool
    """Whether this process reports for all that they serve."""

    @classmethod
    def inherited(cls) -> "Process | None":
        """Return the inherited socket and channel; None if this process is the only one, or the first."""
        given = os.environ.pop(VARIABLE, "").split()
        if len(given) != 3:
            return None
        listener, channel = (socket.socket(fileno=int(each)) for each in given[:2])
        return cls(listener, channel, given[2] == "1")

    def is_ready(self, end: Callable[[], object]) -> None:
        """Report that this process serves; call `end` when the first process has ended."""
        with suppress(OSError):
            self.channel.send(_READY)
        self.channel.setblocking(False)
        loop = asyncio.get_running_loop()

        def read() -> None:
            # The first process sends nothing: this is the end of the channel.
            with suppress(OSError):
                self.channel.recv(1)
            loop.remove_reader(self.channel)
            end()

        loop.add_reader(self.channel, read)

    def reload_all(self) -> None:
        """Let all processes read the config again."""
        with suppress(OSError):
            self.channel.send(_RELOAD)


async def supervise(
    arguments: Sequence[str], count: int, listener: socket.socket, grace: float
) -> int:
    """Run several processes of this program until SIGTERM or SIGINT; return the exit code.

    Args:
        arguments: Of the command that each of them runs.
        count: How many.
        listener: The socket that they share; it is closed first, so no request waits for a process that ends.
        grace: Seconds that they have to end before they are killed.
    """
    loop = asyncio.get_running_loop()
    processes = _Processes([sys.executable, "-m", "operations", *arguments], listener)
    with shutdown_event() as shutdown:
        loop.add_signal_handler(signal.SIGHUP, processes.reload)
        tasks = [asyncio.create_task(processes.keep(number)) for number in range(count)]
        stopping = asyncio.create_task(shutdown.wait())
        try:
            ended, _ = await asyncio.wait({stopping, *tasks}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            loop.remove_signal_handler(signal.SIGHUP)
            stopping.cancel()
            listener.close()
            processes.stop()
            _, late = await asyncio.wait(tasks, timeout=grace)
            if late:
                processes.signal(signal.SIGKILL)
                await asyncio.wait(late)
    # If one could not be started, its exit code gives the reason.
    codes = [task.result() for task in tasks if stopping in ended or task in ended]
    return next((abs(code) for code in codes if code), 0)


class _Processes:
    """The processes that serve."""

    def __init__(self, command: Sequence[str], listener: socket.socket) -> None:
        self._command = command
        self._listener = listener
        self._running: dict[asyncio.subprocess.Process, socket.socket] = {}
        """With the channel to each."""
        self._stopping = asyncio.Event()
        self._was_ready = False

    def reload(self) -> None:
        """Let all of them read the config again."""
        self.signal(signal.SIGHUP)

    def stop(self) -> None:
        """Let all of them finish their calls and end.

        Not by a signal: a service manager may send one to all processes at once, and a second one ends a process
        without delay.
        """
        self._stopping.set()
        for channel in self._running.values():
            with suppress(OSError):
                channel.shutdown(socket.SHUT_RDWR)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to all of them."""
        for process in self._running:
            with suppress(ProcessLookupError):
                process.send_signal(number)

    async def keep(self, number: int) -> int:
        """Start one process again and again; return the exit code of the last one.

        If the first ones end before any of them is ready, something is wrong that starting again does not help.
        """
        backoff = Backoff(FIRST_PAUSE, LONGEST_PAUSE)
        while True:
            code = await self._run(number, backoff)
            if self._stopping.is_set():
                return code
            if not self._was_ready:
                return code or _ENDED
            logger.warning("process %d ended with %d and is started again", number, code)
            with suppress(TimeoutError):
                async with asyncio.timeout(backoff.pause()):
                    await self._stopping.wait()
            if self._stopping.is_set():
                return 0

    async def _run(self, number: int, backoff: Backoff) -> int:
        mine, theirs = socket.socketpair()
        descriptors = self._listener.fileno(), theirs.fileno()
        announces = int(number == 0 and not self._was_ready)
        with mine, theirs:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                env={**os.environ, VARIABLE: f"{descriptors[0]} {descriptors[1]} {announces}"},
                pass_fds=descriptors,
                # Ctrl-C reaches the first process alone, which ends the others in order.
                start_new_session=True,
            )
            theirs.close()
            self._running[process] = mine
            if self._stopping.is_set():
                self.stop()
            listening = asyncio.create_task(self._listen(mine, backoff))
            try:
                return await process.wait()
            finally:
                del self._running[process]
                listening.cancel()
                await asyncio.wait({listening})

    async def _listen(self, channel: socket.socket, backoff: Backoff) -> None:
        """Read the reports of a process."""
        channel.setblocking(False)
        loop = asyncio.get_running_loop()
        with suppress(OSError):
            while said := await loop.sock_recv(channel, 1):
                if said == _READY:
                    self._was_ready = True
                    backoff.reset()
                else:
                    self.reload()
