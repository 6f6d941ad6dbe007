"""A clock that tests may change."""

from collections.abc import Callable

import pytest

from operations.base import clock as _clock
from operations.base.clock import MachineClock

SetClock = Callable[[Callable[[], float]], None]


@pytest.fixture
def set_clock(monkeypatch: pytest.MonkeyPatch) -> SetClock:
    """Return a function that replaces the clock by one that never steps: time passes as the real time says."""

    def replace(wall: Callable[[], float]) -> None:
        monkeypatch.setattr(_clock, "machine", MachineClock(wall, wall))

    return replace
