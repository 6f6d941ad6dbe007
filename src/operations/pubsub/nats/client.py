"""A NATS client that extends the library's own.

Rule 1: an address with TLS means TLS or no connection: without it, not even the login is sent.
Rule 2: it reconnects after every error; the library's client closes permanently at most errors.
Rule 3: messages are processed in the turn in which they are read. The library would queue each for a task of its own,
        which costs more than everything else; and unread messages wait in the socket, not in our memory. Its parser
        copies every message twice, and its `publish` takes three coroutines, so both have a short cut here.
Rule 4: the first attempt to connect ends at errors that a retry cannot fix: a rejected login or certificate.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from ssl import SSLCertVerificationError
from typing import Any, TypeAlias
from urllib.parse import unquote

import msgspec
from nats.aio.client import Client
from nats.aio.transport import WebSocketTransport
from nats.errors import Error
from nats.protocol.parser import AWAITING_MSG_PAYLOAD, Parser

from operations._resilience import Backoff
from operations.errors import TransportError
from operations.pubsub.base import LogThrottle

logger = logging.getLogger("operations")

_CLOSE_TIMEOUT = 2.0
"""Seconds for a connection to be closed."""

Take: TypeAlias = Callable[[bytes, str, str], None]
"""Takes a message, the subject that an answer goes to, and its own subject. Must return at once."""


class _NoTLSError(Error):
    """The server does not offer the TLS that the address requires."""


class _MessageParser(Parser):
    """Delivers whole messages without headers, and leaves everything else to the library."""

    def __init__(self, client: "ReconnectingClient") -> None:
        super().__init__(client)  # pyright: ignore[reportUnknownMemberType]
        self._client = client

    async def parse(self, data: bytes = b"") -> None:
        """Process what was read from the connection."""
        if self.state == AWAITING_MSG_PAYLOAD:
            missing = self.needed + 2 - len(self.buf)
            await super().parse(data[:missing])
            data = data[missing:]
        elif self.buf:
            data = bytes(self.buf) + data
            self.buf.clear()
        position, size = 0, len(data)
        while data.startswith(b"MSG ", position):
            began = position
            start = data.find(b"\r\n", position) + 2
            words = data[position + 4 : start].split()
            if start < 2 or len(words) not in (3, 4) or not words[-1].isdigit():
                break
            end = start + int(words[-1])
            if end + 2 > size:
                break
            position = end + 2
            reply = words[2] if len(words) == 4 else b""
            if not self._client.take(words[1], words[0], reply, data[start:end]):
                await super().parse(data[began:position])
        if position < size:
            await super().parse(data[position:])


class ReconnectingClient(Client):
    """A client that reconnects after every error."""

    def __init__(self) -> None:
        super().__init__()
        self._ps = _MessageParser(self)
        self._refusals: dict[str, str] = {}
        self._takers: dict[bytes, Take] = {}
        self._broken = LogThrottle()
        self._closing: set[asyncio.Task[None]] = set()
        self.backoff = Backoff()

    def take_at_once(self, subscription: Any, take: Take) -> Callable[[], object]:
        """Give the messages of `subscription` to `take`, except those with headers or without a body.

        Returns:
            Call it when the subscription has ended.
        """
        sid = next(b"%d" % sid for sid, known in self._subs.items() if known is subscription)
        self._takers[sid] = take
        return partial(self._takers.pop, sid, None)

    def take(self, sid: bytes, subject: bytes, reply: bytes, body: bytes) -> bool:
        """Deliver a message; return False if the library has to."""
        take = self._takers.get(sid)
        if take is None or not body:
            return False
        try:
            take(body, reply.decode(), subject.decode())
        except Exception:  # noqa: BLE001 - no message may stop the reader
            self._log_broken()
        return True

    async def _process_msg(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes
    ) -> None:
        if headers or not self.take(b"%d" % sid, subject, reply, data):
            try:
                await super()._process_msg(sid, subject, reply, data, headers)
            except Exception:  # noqa: BLE001 - no message may stop the reader
                self._log_broken()

    def _log_broken(self) -> None:
        """Log a message that failed."""
        level = self._broken.level()
        logger.log(level, "a message from NATS could not be taken", exc_info=True)

    async def publish_now(self, subject: str, body: bytes, reply: str = "") -> None:
        """Publish a message to a subject that was checked; wait only while too much is unwritten.

        Raises:
            nats.errors.Error: If it cannot be sent.
        """
        if not self.is_connected or len(body) > self.max_payload:
            await self.publish(subject, body, reply)
            return
        line = f"PUB {subject} {reply} {len(body)}\r\n"
        await self._send_command(b"%b%b\r\n" % (line.encode(), body))
        if self._flush_queue is not None and self._flush_queue.empty():
            await self._flush_pending()

    def next_server(self, servers: list[Any], info: dict[str, Any]) -> tuple[Any, float]:
        """Return the server to connect to next: the one after the last one, whose host may be gone."""
        last = self._current_server.uri.netloc if self._current_server else ""
        names = [server.uri.netloc for server in servers]
        start = names.index(last) + 1 if last in names else 0
        return servers[start % len(servers)], self.backoff.pause()

    async def close(self) -> None:
        """Disconnect. Data that is pending while the connection is lost is dropped."""
        if not self.is_connected:
            # The library would write it to the closed socket, which raises on Python 3.13.
            self._hang_up()
        await super().close()
        if self._closing:
            await asyncio.wait(self._closing, timeout=_CLOSE_TIMEOUT)

    async def _process_connect_init(self) -> None:
        is_first = not self.is_reconnecting
        try:
            await super()._process_connect_init()
        except TimeoutError:
            self._hang_up()
            raise Error("the server does not respond: is it NATS?") from None
        except (Error, OSError) as error:
            self._hang_up()
            reason = _refusal(error)
            if reason:
                self._refused(reason, is_first)
            raise
        self._refusals.clear()

    def _hang_up(self) -> None:
        """Leave a server that did not take us. The library would keep the socket, and may write to it later."""
        transport: Any = self._transport
        self._transport = None
        if transport is not None:
            transport.close()
        if isinstance(transport, WebSocketTransport):
            # Its session is closed only by this.
            closing = asyncio.get_running_loop().create_task(_closed(transport))
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    def _refused(self, reason: str, is_first: bool) -> None:
        """Note why a server does not take us.

        Raises:
            TransportError: If there never was a connection, and no server is left to try.
        """
        address = self._current_server.uri.netloc if self._current_server else ""
        if not is_first and self._refusals.get(address) != reason:
            logger.warning("NATS: %s", reason)
        self._refusals[address] = reason
        if is_first and all(server.netloc in self._refusals for server in self.servers):
            raise TransportError(reason)

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        # Before anything is sent; the library itself asks for TLS only where the server insists.
        if initial_connection and self._wants_tls():
            if not (info.get("tls_required") or info.get("tls_available")):
                raise _NoTLSError(
                    "the server offers no TLS; nothing was sent to it. Without TLS the address is nats://"
                )
            info["tls_required"] = True
        await super()._process_info(info, initial_connection)

    def _wants_tls(self) -> bool:
        scheme = self._current_server.uri.scheme if self._current_server else ""
        if self.options["tls_handshake_first"] or scheme in ("ws", "wss"):
            # Then it is there already, or underneath.
            return False
        return scheme == "tls" or "tls" in self.options

    def _connect_command(self) -> bytes:
        command = super()._connect_command()
        if self.options["user"] is not None or self.options["token"] is not None:
            return command
        # The library does not decode the login in an address.
        name, _, text = command.partition(b" ")
        login = msgspec.json.decode(text, type=dict[str, Any])
        for key in ("user", "pass", "auth_token"):
            if key in login:
                login[key] = unquote(login[key])
        return b"%s %s\r\n" % (name, msgspec.json.encode(login))

    async def _process_err(self, err_msg: str) -> None:
        if self.is_connecting or "permissions violation" in err_msg.lower():
            await super()._process_err(err_msg)
        else:
            logger.warning("NATS: %s", err_msg)
            await self._process_op_err(Error(f"nats: {err_msg}"))


async def _closed(transport: Any) -> None:
    """Wait until a transport is closed."""
    with suppress(Error, OSError, TimeoutError):
        async with asyncio.timeout(_CLOSE_TIMEOUT):
            await transport.wait_closed()


def _refusal(error: Exception) -> str:
    """Why it is of no use to try again; empty where it may be."""
    text = str(error)
    if "authorization" in text.lower() or "authentication" in text.lower():
        reason = text.removeprefix("nats: ").strip("'")
        return f"{reason}: the login is wrong, or there is none"
    return text if isinstance(error, (_NoTLSError, SSLCertVerificationError)) else ""
