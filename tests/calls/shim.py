"""A target that wraps another one and drops, repeats, swaps or damages messages."""

from collections.abc import Callable, Iterable
from typing import Any


def as_they_are(body: bytes) -> Iterable[bytes]:
    """Pass every message on."""
    return (body,)


class Shim:
    """Wraps a target; `on_send` and `on_enqueue` replace sent messages and requests."""

    local = None

    def __init__(
        self,
        target: Any,
        on_send: Callable[[bytes], Iterable[bytes]] = as_they_are,
        on_enqueue: Callable[[bytes], Iterable[bytes]] = as_they_are,
    ) -> None:
        self._target = target
        self._on_send = on_send
        self._on_enqueue = on_enqueue

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    async def send(self, address: str, body: bytes) -> None:
        for changed in self._on_send(body):
            await self._target.send(address, changed)

    async def enqueue(self, queue: str, body: bytes, **options: Any) -> str:
        receipt = ""
        for changed in self._on_enqueue(body):
            receipt = await self._target.enqueue(queue, changed, **options)
        return receipt
