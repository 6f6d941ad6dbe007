"""The workers of a group, as one client knows them from their reports. Sends no messages.

Rule 1: any client may claim to be a worker, so the number of stored workers is limited.
Rule 2: a client that chooses the worker of each request (NATS) takes one with the fewest of its own open requests,
        among those that accept requests.
"""

import asyncio
from collections import deque
from collections.abc import Container
from itertools import islice
from random import random

from operations.calls.events import AlivePayload
from operations.calls.states import PendingCall

_MAX_WORKERS = 10_000
"""The largest number of stored workers."""

_MAX_DEPARTED = 1000
"""The number of stored workers that were lost or have left."""

_FAILED_SECONDS = 1.0
"""Seconds for which a call that failed counts as open at its worker; otherwise a worker whose calls fail at once would
get nearly all of them."""


class KnownWorkers:
    """The workers that have reported to one client.

    Attributes:
        heard_at: When each worker last reported, by the loop's clock.
        is_complete: Whether every worker that can start requests without confirmation is known.
        departures: The number of workers that were lost or have left.
        specs_changed: Set when the workers serve other operations than before.
        has_chosen: Whether the client has chosen a worker since it last probed all of them.
    """

    def __init__(self) -> None:
        self.heard_at: dict[str, float] = {}
        self.is_complete = False
        self.departures = 0
        self.specs_changed = asyncio.Event()
        self.has_chosen = False
        self._departed: deque[str] = deque(maxlen=_MAX_DEPARTED)
        self._specs: dict[str, str] = {}
        self._accepting: set[str] = set()
        self._open: dict[str, int] = {}

    def record(self, alive: AlivePayload, now: float) -> None:
        """Record the report of a worker, which may be leaving."""
        worker = alive.worker
        self._accepting.discard(worker)
        if worker not in self.heard_at and len(self.heard_at) >= _MAX_WORKERS:
            self.is_complete = False
            return
        self.heard_at[worker] = now
        if alive.accepts:
            self._accepting.add(worker)
        if alive.leaving:
            self._forget_specs(worker)
        elif alive.specs and self._specs.get(worker) != alive.specs:
            self._specs.pop(worker, None)
            self._specs[worker] = alive.specs
            self.specs_changed.set()

    def forget(self, worker: str) -> None:
        """Remove a worker that was lost or has left."""
        self._accepting.discard(worker)
        if self.heard_at.pop(worker, None) is not None:
            self.departures += 1
            self._departed.append(worker)
        self._forget_specs(worker)

    def _forget_specs(self, worker: str) -> None:
        if self._specs.pop(worker, None) is not None:
            self.specs_changed.set()

    def forget_all(self) -> None:
        """Remove all workers."""
        for worker in tuple(self.heard_at):
            self.forget(worker)

    def since(self, departures: int) -> set[str] | None:
        """Return all workers, including those that have left since then; None if some of these are not stored.

        Args:
            departures: The value of `departures` at that time.
        """
        left = self.departures - departures
        if left > len(self._departed):
            return None
        return {*self.heard_at, *islice(reversed(self._departed), left)}

    # ---------------------------------------------------------------------------------------- versions

    @property
    def by_specs(self) -> dict[str, str]:
        """One worker for each digest of specs in the group, ordered by arrival."""
        return {digest: worker for worker, digest in self._specs.items()}

    def specs_of(self, worker: str | None) -> str:
        """Return the digest of the specs of a worker; empty if it is unknown."""
        return self._specs.get(worker or "", "")

    def find_other(self, refused: Container[str]) -> str:
        """Return a worker with other specs than these, preferably one that accepts requests; empty if there is none."""
        others = [worker for worker, digest in self._specs.items() if digest not in refused]
        return min(
            others, key=lambda each: (each not in self._accepting, self._load(each)), default=""
        )

    # ---------------------------------------------------------------------------------------- choosing

    def choose(self) -> str:
        """Return the worker for the next request; empty if none is known."""
        self.has_chosen = True
        accepting = self._accepting
        return min(accepting, key=self._load) if len(accepting) > 1 else next(iter(accepting), "")

    def _load(self, worker: str) -> tuple[int, float]:
        """Return the order of a worker, at random among those with as many open requests."""
        return self._open.get(worker, 0), random()  # noqa: S311 - it only distributes requests

    def skip(self, worker: str) -> None:
        """Do not choose a worker until it reports again."""
        self._accepting.discard(worker)

    def skip_silent(self, since: float) -> None:
        """Do not choose workers that have not reported since then, until they report again."""
        self._accepting = {each for each in self._accepting if self.heard_at[each] >= since}

    def occupy(self, call: PendingCall, worker: str) -> None:
        """Count a request as open at this worker, instead of the one before."""
        before, call.occupies = call.occupies, worker
        if worker:
            self._open[worker] = self._open.get(worker, 0) + 1
        if before:
            self._open[before] -= 1
            if not self._open[before]:
                del self._open[before]

    def release(self, call: PendingCall, *, has_failed: bool) -> None:
        """Do not count an ended call as open any more."""
        if has_failed:
            asyncio.get_running_loop().call_later(_FAILED_SECONDS, self.occupy, call, "")
        else:
            self.occupy(call, "")
