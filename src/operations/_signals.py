"""The signals that end what serves, of which a process may have more than one."""

import asyncio
import signal
from collections.abc import Generator
from contextlib import contextmanager

_SIGNALS = (signal.SIGTERM, signal.SIGINT)

_waiting: dict[asyncio.AbstractEventLoop, list[asyncio.Event]] = {}


@contextmanager
def heeded_signals() -> Generator[asyncio.Event]:
    """For the length of the block SIGTERM and SIGINT set this event, and those of all others who wait on this loop.

    A second one ends the process at once. Enter it before saying that one is ready: who reads that may end the process
    in the same moment.
    """
    loop = asyncio.get_running_loop()
    events = _waiting.setdefault(loop, [])

    def heed() -> None:
        if all(event.is_set() for event in events):
            raise SystemExit(1)
        for event in events:
            event.set()

    told = asyncio.Event()
    events.append(told)
    if len(events) == 1:
        for number in _SIGNALS:
            loop.add_signal_handler(number, heed)
    try:
        yield told
    finally:
        events.remove(told)
        if not events:
            del _waiting[loop]
            for number in _SIGNALS:
                loop.remove_signal_handler(number)
                if told.is_set():
                    # What is left is tidying up, and whoever will not wait for that gets no traceback.
                    signal.signal(number, signal.SIG_DFL)
