"""Event loops whose time does not depend on the machine."""

import asyncio
import selectors
from contextvars import Context
from typing import Any

import pytest


class MovableLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock can be moved forward, and that counts its timers."""

    def __init__(self, selector: selectors.BaseSelector | None = None) -> None:
        super().__init__(selector)
        self.ahead = 0.0
        self.timers = 0

    def time(self) -> float:
        return super().time() + self.ahead

    def call_at(  # type: ignore[override]
        self, when: float, callback: Any, *args: Any, context: Context | None = None
    ) -> Any:
        self.timers += 1
        return super().call_at(when, callback, *args, context=context)


class _Skipping(selectors.DefaultSelector):
    """A selector that moves the clock of its loop instead of waiting."""

    loop: "VirtualLoop"

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            return super().select(None)
        found = super().select(0)
        if not found:
            self.loop.now += timeout
        return found


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in which computing takes no time: its clock moves only to the next timer, when nothing else is due.

    For tests in one process, without connections and threads: those would be as slow as ever, while the clock runs.
    """

    def __init__(self) -> None:
        selector = _Skipping()
        selector.loop = self
        self.now = 1000.0
        super().__init__(selector)

    def time(self) -> float:
        return self.now


virtual_time = pytest.mark.parametrize(
    "anyio_backend", [("asyncio", {"loop_factory": VirtualLoop})], ids=["virtual time"]
)
"""Run an asynchronous test in a `VirtualLoop`."""
