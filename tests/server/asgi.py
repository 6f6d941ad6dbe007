"""An ASGI application called in the process: one request in, one response out."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message
from tests.limits import time_limit


@dataclass(frozen=True, slots=True)
class Response:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return msgspec.json.decode(self.body)


@dataclass(frozen=True, slots=True)
class Client:
    """Sends requests to `app` as a client at `address` would."""

    app: ASGIApp
    headers: Mapping[str, str] | None = None
    address: str = "127.0.0.1"

    async def get(self, target: str, **options: Any) -> Response:
        return await self.request("GET", target, **options)

    async def post(self, target: str, json: Any = ..., **options: Any) -> Response:
        if json is not ...:
            options["body"] = msgspec.json.encode(json)
            options["headers"] = {
                "content-type": "application/json",
                **(options.get("headers") or {}),
            }
        return await self.request("POST", target, **options)

    async def request(
        self,
        method: str,
        target: str,
        *,
        body: bytes = b"",
        headers: Mapping[str, str] | None = None,
        root_path: str = "",
    ) -> Response:
        raw_path, _, query = target.partition("?")
        sent = {"host": "localhost", **(self.headers or {}), **(headers or {})}
        if body:
            sent.setdefault("content-length", str(len(body)))
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": raw_path.replace("%2F", "/").replace("%2e", "."),
            "raw_path": raw_path.encode(),
            "query_string": query.encode(),
            "root_path": root_path,
            "headers": [(name.encode(), value.encode("latin-1")) for name, value in sent.items()],
            "client": (self.address, 5000),
            "server": ("127.0.0.1", 80),
        }
        messages: list[Message] = []
        waiting = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Message:
            if waiting:
                return waiting.pop()
            await asyncio.Event().wait()
            raise AssertionError

        async def send(message: Message) -> None:
            messages.append(message)

        with time_limit(20):
            await self.app(scope, receive, send)
        return Response(
            messages[0]["status"],
            {name.decode(): value.decode("latin-1") for name, value in messages[0]["headers"]},
            b"".join(message.get("body", b"") for message in messages[1:]),
        )
