"""Staying until one is told to go."""

import asyncio
import signal


def heed_signals() -> asyncio.Event:
    """From now on Ctrl-C or a request to end sets this event; a second one ends the process at once.

    Called before a command says that it is ready: who reads that may end it in the same moment.
    """
    loop = asyncio.get_running_loop()
    told = asyncio.Event()
    signals = (signal.SIGINT, signal.SIGTERM)

    def stop() -> None:
        told.set()
        for number in signals:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)

    for number in signals:
        loop.add_signal_handler(number, stop)
    return told
