"""Keep the garbage collector out of the way while many objects are made, and let it find garbage afterwards."""

import asyncio
import gc
from collections.abc import Generator
from contextlib import contextmanager

_MANY = 10_000
"""New objects that are worth being aged."""


@contextmanager
def gc_paused(*, collects: bool = True) -> Generator[None]:
    """Pause the garbage collector while long-lived objects are created, for example from a document.

    There may be tens of thousands of them. Each collection meanwhile would visit every object of the process, which
    holds the interpreter for longer than the work itself takes.

    Args:
        collects: Whether garbage may be looked for at the end; a call that must be quick leaves that to a later block.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            _collector.age(collects=collects)
            gc.enable()


def pause_collector() -> None:
    """Let the garbage collector wait until the next turn of the event loop, while another library decodes a large body.

    As `_json.build_from` does for our own decoders.
    """
    if gc.isenabled():
        gc.disable()
        asyncio.get_running_loop().call_soon(gc.enable)


class _Collector:
    """Counts new objects as old at once, instead of visiting them as new, if they are many.

    The interpreter does not know that there are more old objects then, and would never look for garbage among them.
    """

    def __init__(self) -> None:
        self._aged = 0
        """Objects that were aged since the last full collection."""
        self._kept = 0
        """Objects that were there then."""

    def age(self, *, collects: bool) -> None:
        new = gc.get_count()[0]
        if (collects and new < _MANY) or gc.get_freeze_count():
            return
        gc.freeze()
        gc.unfreeze()
        self._aged += new
        if not collects:
            return
        if not self._kept:
            # The first time, nothing that was made can have become garbage. Counting all objects takes too long.
            self._kept, self._aged = new, 0
        elif self._aged > self._kept:
            gc.collect()
            gc.freeze()
            self._kept, self._aged = gc.get_freeze_count(), 0
            gc.unfreeze()


_collector = _Collector()
