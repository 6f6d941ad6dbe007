"""Watch the callers of a worker and its event loop."""

import asyncio
import logging
from typing import Protocol

from operations.calls.jobs import Job
from operations.calls.presence import SETTLING, is_there
from operations.errors import TransportError
from operations.pubsub.base import EventTarget

logger = logging.getLogger("operations")

_LOOK = 0.25
"""Seconds between two checks of the callers; a caller that misses two is gone."""

_STANDSTILL = 1.0
"""Seconds for which the event loop may be blocked without a warning."""


class Watched(Protocol):
    """What the watchdog needs of a worker."""

    target: EventTarget
    jobs: dict[str, Job]
    restored_at: float

    def give_up(self, job: Job, reason: str) -> None:
        """Cancel a job that will not be finished here."""
        ...


async def watch_callers(worker: Watched) -> None:
    """Cancel the calls of callers that are gone."""
    loop = asyncio.get_running_loop()
    while True:
        await asyncio.sleep(_LOOK)
        now = loop.time()
        old = [job for job in worker.jobs.values() if now - job.arrived_at > _LOOK]
        if not old or now - worker.restored_at < SETTLING or not worker.target.is_connected:
            continue
        callers = list({job.reply_to for job in old})
        try:
            present = await asyncio.gather(*(is_there(worker.target, caller) for caller in callers))
        except TransportError:
            continue
        gone = {caller for caller, there in zip(callers, present, strict=True) if not there}
        for job in old:
            job.absent = job.absent + 1 if job.reply_to in gone else 0
            if job.absent > 1:
                # A caller that was only disconnected receives the error when it is back.
                worker.give_up(job, "the caller was gone")


async def watch_loop_lag(worker: Watched) -> None:
    """Warn when the event loop was blocked."""
    loop = asyncio.get_running_loop()
    tick = _STANDSTILL / 4
    while True:
        before = loop.time()
        await asyncio.sleep(tick)
        late = loop.time() - before - tick
        if late > _STANDSTILL:
            suspects = sorted({job.request.operation_id for job in worker.jobs.values()})
            logger.warning(
                "the event loop was blocked for %.1f s; running then: %s",
                late,
                ", ".join(suspects[:10]) or "nothing that still runs",
            )
