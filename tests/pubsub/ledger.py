"""A record of executed mutations, independent of the library."""

import asyncio
import os
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from time import time

from tests.limits import time_limit

from operations.base.errors import CallError
from operations.calls import PendingRequestMap
from operations.registry import OperationRegistry

_PAUSE = 0.01
"""Seconds between two payments of one payer."""


class Ledger:
    """Payments, each in one line of a file that is only appended to.

    Args:
        path: The file.
        timeout: Seconds for each call.

    Attributes:
        outcomes: The results of the callers: "paid" or the code of an error, by the number of the payment.
    """

    def __init__(self, path: Path, timeout: float = 20) -> None:
        self.path = path
        self.timeout = timeout
        self.outcomes: dict[int, str] = {}
        self._numbers = count()

    def registry(self) -> OperationRegistry:
        """Return a registry with the mutation that pays."""
        registry = OperationRegistry()

        @registry.operation("ledger.pay")
        async def pay(number: int, until: float) -> int:
            line = f"{number} {time() - until:.3f}\n".encode()
            file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
            os.write(file, line)
            os.close(file)
            return number

        return registry

    async def pay(self, calls: PendingRequestMap) -> str:
        """Pay once."""
        number = next(self._numbers)
        value = {"number": number, "until": time() + self.timeout}
        try:
            envelope = await calls.call("ledger.pay", value, timeout=self.timeout)
        except CallError as error:
            self.outcomes[number] = f"{error.code}: {error}"
        else:
            assert envelope.data == number
            self.outcomes[number] = "paid"
        return self.outcomes[number]

    @asynccontextmanager
    async def traffic(self, *callers: PendingRequestMap, payers: int = 4) -> AsyncGenerator[None]:
        """Pay repeatedly for the duration of the block, and wait for the last payments."""
        is_over = False

        async def payer(calls: PendingRequestMap) -> None:
            while not is_over:
                await self.pay(calls)
                await asyncio.sleep(_PAUSE)

        tasks = [asyncio.create_task(payer(calls)) for calls in callers for _ in range(payers)]
        try:
            yield
        finally:
            is_over = True
            with time_limit(self.timeout + 30):
                await asyncio.gather(*tasks)

    async def progress(self, payments: int, seconds: float = 60) -> None:
        """Wait for more payments to end."""
        goal = len(self.outcomes) + payments
        with time_limit(seconds):
            while len(self.outcomes) < goal:
                await asyncio.sleep(_PAUSE)

    def check(self, *, failures: int) -> None:
        """Compare the executions with the results of callers; at most `failures` of them may have failed."""
        entries = [line.split() for line in self.path.read_text(encoding="utf-8").splitlines()]
        ran = Counter(int(number) for number, _ in entries)
        paid = {number for number, outcome in self.outcomes.items() if outcome == "paid"}
        assert [number for number, times in ran.items() if times > 1] == []
        assert paid - set(ran) == set()
        assert [late for _, late in entries if float(late) > 0] == []
        failed = Counter(outcome for outcome in self.outcomes.values() if outcome != "paid")
        assert sum(failed.values()) <= failures, failed
