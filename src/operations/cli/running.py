"""Staying until one is told to go."""

import asyncio
import signal


async def until_stopped() -> None:
    """Wait for Ctrl-C or a request to end; a second one ends the process at once."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    signals = (signal.SIGINT, signal.SIGTERM)

    def stopped() -> None:
        stop.set()
        for number in signals:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)

    for number in signals:
        loop.add_signal_handler(number, stopped)
    await stop.wait()
