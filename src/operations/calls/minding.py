"""What a worker keeps an eye on: whether its callers are still there, and whether it is itself."""

import asyncio
import logging
from typing import Protocol

from operations.calls.jobs import Job
from operations.calls.presence import SETTLING, is_there
from operations.errors import TransportError
from operations.pubsub.base import EventTarget

logger = logging.getLogger("operations")

_LOOK = 0.25
"""Seconds between looks for the callers; two looks decide."""

_STANDSTILL = 1.0
"""Seconds of standstill of the event loop that are worth a warning."""


class Minded(Protocol):
    """What is needed of the worker."""

    target: EventTarget
    jobs: dict[str, Job]
    restored_at: float

    def give_up(self, job: Job, reason: str) -> None:
        """Cancel a job that will not be finished here."""
        ...


async def mind_the_callers(worker: Minded) -> None:
    """Stop what runs for callers that are gone."""
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
                # Heard by one that was only cut off, and comes back.
                worker.give_up(job, "the caller was gone")


async def mind_the_loop(worker: Minded) -> None:
    """Warn when something kept everything else waiting."""
    loop = asyncio.get_running_loop()
    tick = _STANDSTILL / 4
    while True:
        before = loop.time()
        await asyncio.sleep(tick)
        late = loop.time() - before - tick
        if late > _STANDSTILL:
            suspects = sorted({job.request.operation_id for job in worker.jobs.values()})
            logger.warning(
                "the event loop stood still for %.1f s; running then: %s",
                late,
                ", ".join(suspects[:10]) or "nothing that is still here",
            )
