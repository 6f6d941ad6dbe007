"""A reader of event streams, written from the standard, apart from the one in the package."""

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec


@dataclass(frozen=True, slots=True)
class Event:
    event: str
    data: str
    id: str

    @property
    def json(self) -> Any:
        return msgspec.json.decode(self.data)


async def events_of(response: aiohttp.ClientResponse) -> AsyncIterator[Event]:
    """The events of a response, as a browser would dispatch them."""
    name, last_id = "", ""
    data: list[str] = []
    async for raw in response.content:
        line = raw.decode().rstrip("\r\n")
        if not line:
            if data:
                yield Event(name or "message", "\n".join(data), last_id)
            name, data = "", []
            continue
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "data":
            data.append(value)
        elif field == "event":
            name = value
        elif field == "id":
            last_id = value
