"""Processes that run a script and are killed at one of its suspensions, or at a commit of its run."""

import os
import signal
from pathlib import Path
from typing import Any

from tests.runs import shop
from tests.runs.shop import killed_at_commit, outcome, registry_of

from operations.code import Code, CodeLimits
from operations.code.sandbox import Session

SCRIPT = """
import asyncio, random, time

first = await shop.charge(order="A", amount=1)
prices = await asyncio.gather(*(shop.price(item=item) for item in (1, 2)))
started, chance = time.time(), random.randrange(10 ** 6)
several = await asyncio.gather(
    shop.charge(order="A", amount=2),
    shop.reserve(order="A", item=1),
    shop.charge(order="A", amount=3),
    shop.reserve(order="A", item=2),
)
same = await asyncio.gather(*(shop.charge(order="B", amount=5) for _ in range(2)))
named = await shop.charge(order=f"{started}-{chance}", amount=4)
return first + sum(prices) + sum(several) + sum(same) + named
"""

RESULT = 1 + 30 + 8 + 10 + 4


async def run(folder: Path, url: str, kill_at: int, moment: str) -> None:
    """Run the script, and be killed; `kill_at` 0 for never."""
    database: Any = None
    if moment == "suspension":
        killed_at_suspension(kill_at)
    else:
        database = killed_at_commit(url, kill_at, moment)
    async with registry_of(folder, url, database) as registry:
        registry.register_all(Code(registry, limits=CodeLimits(processes=1)))
        started = await registry.start(
            "code.run", {"script": SCRIPT}, shop.CUSTOMER, key="script A"
        )
        (folder / "outcome").write_text(await result(started))


async def result(started: Any) -> str:
    text = await outcome(started)
    if started.state.status == "completed":
        return f"completed {started.state.envelope().data['result']}"
    return text


def killed_at_suspension(number: int) -> None:
    """Kill this process when the sandbox has stopped for this time."""
    drive: Any = Session._drive
    left = number

    async def counted(self: Session, *arguments: Any, **named: Any) -> Any:
        nonlocal left
        turn = await drive(self, *arguments, **named)
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return turn

    Session._drive = counted  # type: ignore[method-assign]
