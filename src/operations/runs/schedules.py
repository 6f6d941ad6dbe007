"""Schedules: one run for each slot of time, whichever process starts it.

Rule 1: the run of a slot has a key, so that several processes start it once.
Rule 2: of the slots that were missed while no process ran, only the latest one runs, and only if it is younger than the
        time between two slots.
Rule 3: a slot before the store has seen a schedule for the first time was not missed. A schedule with other times,
        another operation or another caller is a new one.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from hashlib import sha256
from typing import Any, Final, Protocol, TypeVar

from operations.base.errors import CallError, ErrorCode
from operations.base.json.values import canonical, list_of, object_of
from operations.contract.context import OperationContext
from operations.runs.callers import owner_of
from operations.runs.database import Connection
from operations.runs.texts import cleaned

logger = logging.getLogger("operations")

T = TypeVar("T")

_DAY: Final = 24 * 3600.0

_LOOK_SECONDS: Final = 30.0
"""The longest time between two looks at the clock."""

_FIELDS: Final = (
    ("minute", 0, 59),
    ("hour", 0, 23),
    ("day", 1, 31),
    ("month", 1, 12),
    ("weekday", 0, 7),
)

_NAMES: Final = {
    name: number
    for names, start in (
        ("jan feb mar apr may jun jul aug sep oct nov dec", 1),
        ("sun mon tue wed thu fri sat", 0),
    )
    for number, name in enumerate(names.split(), start)
}

_MAX_DAYS: Final = 366 * 8
"""The largest number of days between two slots: the 29th of February."""


class Cron:
    """A time table of five fields in UTC: minute, hour, day of the month, month, day of the week.

    Each is `*`, a number, a range `1-5`, a list `1,2` or a step `*/15`. If both days are given, either may match.

    Raises:
        ValueError: If it is not valid; the message names the field.
    """

    def __init__(self, text: str) -> None:
        parts = text.split()
        if len(parts) != len(_FIELDS):
            raise ValueError(f"{text!r} needs five fields: minute hour day month weekday")
        minutes, hours, days, months, weekdays = (
            _numbers(part, *field) for part, field in zip(parts, _FIELDS, strict=True)
        )
        self._times = [(hour, minute) for hour in sorted(hours) for minute in sorted(minutes)]
        self._days, self._months = days, months
        self._weekdays = {day % 7 for day in weekdays}
        self._either = parts[2] != "*" and parts[4] != "*"
        if next(self._slots(datetime(2024, 1, 1, tzinfo=UTC), 1), None) is None:
            raise ValueError(f"{text!r} matches no day")

    def _matches(self, day: date) -> bool:
        in_month, in_week = day.day in self._days, day.isoweekday() % 7 in self._weekdays
        is_day = (in_month or in_week) if self._either else (in_month and in_week)
        return day.month in self._months and is_day

    def _slots(self, moment: datetime, step: int) -> Iterator[datetime]:
        """Yield the slots from the day of a moment on, or backwards."""
        times = self._times[::step]
        day = moment.date()
        for _ in range(_MAX_DAYS):
            if self._matches(day):
                for hour, minute in times:
                    yield datetime(day.year, day.month, day.day, hour, minute, tzinfo=UTC)
            day += timedelta(days=step)

    def after(self, moment: datetime) -> datetime:
        """Return the first slot after a moment."""
        return next(slot for slot in self._slots(moment, 1) if slot > moment)

    def until(self, moment: datetime) -> datetime:
        """Return the last slot that is not after a moment."""
        return next(slot for slot in self._slots(moment, -1) if slot <= moment)


def _numbers(text: str, field: str, least: int, most: int) -> set[int]:
    found = set[int]()
    try:
        for part in text.lower().split(","):
            place, _, step = part.partition("/")
            low, dash, high = place.partition("-")
            start = least if low == "*" else _number(low)
            end = _number(high) if dash else (most if low == "*" or step else start)
            if not least <= start <= end <= most or (step and int(step) < 1):
                raise ValueError
            found.update(range(start, end + 1, int(step) if step else 1))
    except ValueError:
        raise ValueError(f"the {field} {text!r} is not valid: {least}-{most}") from None
    return found


def _number(text: str) -> int:
    return _NAMES[text] if text in _NAMES else int(text)


_OPERATOR: Final = OperationContext(trusted=True)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """A run that is started again and again: `every` so many seconds, or at the times of `cron`.

    Raises:
        ValueError: If neither or both are given, or one is not valid.
    """

    operation: str
    input: Any = None

    every: float | None = None
    """Seconds between two slots, which are counted from 1970 on: every 3600 is at each full hour."""

    cron: str | None = None
    """Five fields in UTC; see `Cron`."""

    context: OperationContext = _OPERATOR
    """The caller; by default the operator."""

    def __post_init__(self) -> None:
        if (self.every is None) == (self.cron is None):
            raise ValueError(f"the schedule of {self.operation} needs either every or cron")
        if self.every is not None and self.every < 1:
            raise ValueError(f"the schedule of {self.operation} is at most every second")
        if self.cron is not None:
            Cron(self.cron)

    def around(self, now: int) -> tuple[int, int]:
        """Return the last slot until now and the next one, in milliseconds since the epoch."""
        if self.every is not None:
            step = int(self.every * 1000)
            last = now - now % step
            return last, last + step
        table = Cron(self.cron or "")
        moment = datetime.fromtimestamp(now / 1000, UTC)
        last_slot, next_slot = table.until(moment), table.after(moment)
        return int(last_slot.timestamp() * 1000), int(next_slot.timestamp() * 1000)


class Host(Protocol):
    """What a schedule needs of the store of runs."""

    registry: Any

    def write(self, job: Callable[[Connection], T]) -> "asyncio.Future[T]":
        """Run a job that writes."""
        ...

    def read(self, job: Callable[[Connection], T]) -> "asyncio.Future[T]":
        """Run a job that reads."""
        ...


class ScheduleFollower:
    """Starts the runs of a schedule.

    Args:
        host: The store of runs.
        name: The name of the schedule.
        schedule: The schedule.

    Attributes:
        looked: Set after the first look at the clock.
    """

    def __init__(self, host: Host, name: str, schedule: Schedule) -> None:
        self._host, self._name, self._schedule = host, name, schedule
        self.looked = asyncio.Event()
        self._since: int | None = None
        self._started: int | None = None
        """The slot whose run is certainly stored."""

    async def follow(self) -> None:
        """Start the runs, without end."""
        while True:
            try:
                pause = await self._look()
            except CallError as error:
                logger.warning(
                    "the run of the schedule %s cannot be started: %r", self._name, error
                )
                pause = _LOOK_SECONDS
            self.looked.set()
            # The clock may be set.
            await asyncio.sleep(min(pause, _LOOK_SECONDS))

    async def _look(self) -> float:
        """Start the run of the last slot, unless it has one; return the seconds until the next slot."""
        since = self._since
        if since is None:
            since = await self._host.write(self._seen)
            self._since = since
        now = await self._host.read(lambda db: db.now())
        last, later = self._schedule.around(now)
        is_missed = now - last < later - last
        if is_missed and since <= last != self._started:
            await self._start(last, later)
            self._started = last
        return (later - now) / 1000

    def _seen(self, db: Connection) -> int:
        """Return when the store has seen this schedule for the first time: now, if it has not."""
        schedule = self._schedule
        times = schedule.every or schedule.cron
        facts = [self._name, schedule.operation, times, *owner_of(schedule.context)[:2]]
        text = canonical([cleaned(str(fact)) for fact in facts])
        name = f"schedule:{sha256(text).hexdigest()}"
        sql = "INSERT INTO meta (name, value) VALUES (?, ?) ON CONFLICT (name) DO NOTHING"
        db.count(sql, name, str(db.now()))
        ((since,),) = db.rows("SELECT value FROM meta WHERE name = ?", name)
        return int(since)

    async def _start(self, slot: int, later: int) -> None:
        schedule = self._schedule
        try:
            await self._host.registry.start(
                schedule.operation,
                schedule.input,
                schedule.context,
                key=f"schedule:{self._name}:{slot}",
                # Kept until the next slot, because its key says that it has run.
                retention=max(_DAY, 2 * (later - slot) / 1000),
            )
        except CallError as error:
            if not _is_key_used(error):
                raise
            # The schedule had another input.


def _is_key_used(error: CallError) -> bool:
    """Return whether a run with another input has the key of a start."""
    issues = list_of(object_of(error.details).get("errors"))
    return error.code == ErrorCode.VALIDATION_ERROR and any(
        object_of(each).get("path") == "/key" for each in issues
    )
