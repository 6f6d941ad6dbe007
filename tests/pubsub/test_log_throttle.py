"""Repeated messages are logged at intervals."""

import logging

from operations.base.logs import LogThrottle


def test_the_same_thing_is_a_warning_once_a_minute() -> None:
    times = iter((0.0, 1.0, 59.0, 60.0, 61.0))
    throttle = LogThrottle(lambda: next(times))

    levels = [throttle.level() for _ in range(5)]

    assert levels == [
        *(logging.WARNING, logging.DEBUG, logging.DEBUG),
        *(logging.WARNING, logging.DEBUG),
    ]
