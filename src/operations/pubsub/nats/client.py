"""A NATS client that extends the client of nats-py.

Rule 1: an address with TLS requires TLS: without it, nothing is sent, not even the login.
Rule 2: it reconnects after every error; the library's client closes permanently after most errors.
Rule 3: messages are processed as soon as they are read, and unread messages stay in the socket. The library would pass
        each message through a queue to a task, which is slow. Its parser copies every message twice, and its `publish`
        takes three coroutines, so both have faster versions here.
Rule 4: the first attempt to connect fails at once for errors that a retry cannot fix: a rejected login or certificate.
Rule 5: service discovery (`$SRV.PING`, `INFO` and `STATS`) reports the group, its version and counts, but no
        operation names.
"""

import asyncio
import logging
import re
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import AsyncExitStack, suppress
from datetime import UTC, datetime
from secrets import token_hex
from ssl import SSLCertVerificationError
from typing import Any, TypeAlias, cast
from urllib.parse import unquote

import msgspec
from nats.aio.client import Client
from nats.aio.transport import WebSocketTransport
from nats.errors import Error
from nats.protocol.parser import AWAITING_MSG_PAYLOAD, Parser
from nkeys import NkeysError  # type: ignore[import-untyped] # pyright: ignore[reportMissingTypeStubs]

from operations.base.errors import TransportError
from operations.base.logs import LogThrottle
from operations.base.retry import Backoff
from operations.base.tasks import start_task
from operations.pubsub.base import Subscription, WorkerStats, enforce_loop
from operations.pubsub.config import NOT_PERMITTED
from operations.pubsub.delivery import enforce_size

logger = logging.getLogger("operations")

_CLOSE_TIMEOUT = 2.0
"""Seconds for a connection to be closed."""

NATS_ERRORS = (Error, NkeysError, OSError, EOFError)

SUBJECT = re.compile(r"[\w\-$=]{1,128}(\.[\w\-$=]{1,128}){0,15}", re.ASCII)
"""Matches a subject without wildcards, much shorter than the longest line that a server accepts."""

_REFUSED = re.compile(r'permissions violation for \w+ to "([^"]+)"')
"""The server's error for a subject that this client may not use, in lower case as in the library."""

_VERSION = re.compile(r"\d+\.\d+\.\d+([-+][0-9A-Za-z.+-]+)?", re.ASCII)

MessageHandler: TypeAlias = Callable[[bytes, bytes, bytes, bytes], None]
"""Takes a message, the subject for replies, its own subject, and its headers. Must return at once."""


def subject_of(space: str, name: str) -> str:
    """Return the subject of a name.

    Raises:
        TransportError: If it is not valid: the server would close the connection or treat it as a pattern.
    """
    subject = f"{space}.{name}"
    if SUBJECT.fullmatch(subject) is None:
        raise TransportError(
            f"{subject!r} is not a NATS subject: prefix, group and client are words of A-Z, a-z, 0-9, '_', '-', '$' "
            "and '=', with dots between them"
        )
    return subject


def sender_of(prefix: str, subject: bytes) -> str:
    """Return the common prefix of all mailboxes of the client in the last token of a subject."""
    return f"{prefix}.box.{subject.rpartition(b'.')[2].decode()}."


class _NoTLSError(Error):
    """The server does not support TLS, which the address requires."""


class _MessageParser(Parser):
    """Delivers complete messages without headers; the library parses everything else."""

    def __init__(self, client: "ReconnectingClient") -> None:
        super().__init__(client)  # pyright: ignore[reportUnknownMemberType]
        self._client = client

    async def parse(self, data: bytes = b"") -> None:
        """Process data from the connection."""
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
            if not self._client.dispatch(words[1], words[0], reply, data[start:end]):
                await super().parse(data[began:position])
        if position < size:
            await super().parse(data[position:])


class ReconnectingClient(Client):
    """A client that reconnects after every error."""

    def __init__(self) -> None:
        super().__init__()
        self._ps = _MessageParser(self)
        self._refusals: dict[str, str] = {}
        self._handlers: dict[bytes, MessageHandler] = {}
        self._broken = LogThrottle()
        self._violations = LogThrottle()
        self._confirming: dict[asyncio.Future[str], set[str]] = {}
        """The subjects of actions in progress. Several may concern the same subject."""

        self._background: set[asyncio.Task[Any]] = set()
        self._closing: set[asyncio.Task[Any]] = set()
        self.backoff = Backoff()
        self._home = asyncio.get_running_loop()

        self.requires_certificate = False
        """Whether the last server requires a certificate of its clients."""

    def start(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        """Run a coroutine in the background until the client is closed."""
        return start_task(self._background, work)

    # ---------------------------------------------------------------------------------------- subscribing

    async def subscribe_to(
        self, subject: str, handle: MessageHandler, undo: AsyncExitStack, *, queue: str = ""
    ) -> None:
        """Subscribe. `handle` receives the messages.

        Raises:
            TransportError: If subscribing fails.
        """
        # Set first, because a message may arrive before `subscribe` returns.
        sid = b"%d" % (self._sid + 1)
        self._handlers[sid] = handle
        try:
            subscription = await self.subscribe(subject, queue=queue)  # pyright: ignore[reportUnknownMemberType]
        except NATS_ERRORS as error:
            del self._handlers[sid]
            raise TransportError(f"NATS: {error}") from error
        undo.push_async_callback(self._unsubscribe, subscription, sid)

    async def _unsubscribe(self, subscription: Any, sid: bytes) -> None:
        """Unsubscribe, and deliver the messages that have arrived."""

        async def drain() -> None:
            with suppress(*NATS_ERRORS):
                await subscription.drain()
            del self._handlers[sid]

        # Never cancelled, because the client closes its connection when the response to a cancelled flush arrives.
        await asyncio.wait({self.start(drain())}, timeout=_CLOSE_TIMEOUT)

    async def confirm(self, subjects: Iterable[str], act: Callable[[], Awaitable[Any]]) -> None:
        """Subscribe or publish to `subjects` and wait until the server has processed it.

        Raises:
            TransportError: If the server does not respond, or does not allow it.
        """
        refusal = await self.refusal(subjects, act)
        if refusal:
            raise TransportError(f"NATS reported a {refusal}: {NOT_PERMITTED}")

    async def refusal(self, subjects: Iterable[str], act: Callable[[], Awaitable[Any]]) -> str:
        """Return the server's error for an action on `subjects`; empty if it succeeded.

        A probe message is sent, because the client would close its connection when the response to a cancelled flush
        arrived.

        Raises:
            TransportError: If the server does not respond.
        """
        mark = self.new_inbox()
        outcome: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        # The text of the server, in the form of the library.
        self._confirming[outcome] = {subject.lower() for subject in (mark, *subjects)}

        async def arrived(_: Any) -> None:
            if not outcome.done():
                outcome.set_result("")

        try:
            await act()
            echo = await self.subscribe(mark, cb=arrived)  # pyright: ignore[reportUnknownMemberType]
            try:
                await self.publish(mark, b"1")
                async with asyncio.timeout(5):
                    return await outcome
            finally:
                self.start(_unsubscribe(echo))
        except TimeoutError:
            raise TransportError("NATS does not respond") from None
        except NATS_ERRORS as error:
            raise TransportError(f"NATS: {error}") from error
        finally:
            del self._confirming[outcome]

    async def on_error(self, error: Exception) -> None:
        """Record an error that the server reports."""
        refused = _REFUSED.search(str(error))
        if refused is None:
            logger.debug("NATS: %s", error)
            return
        concerned = [each for each, names in self._confirming.items() if refused[1] in names]
        for outcome in concerned:
            if not outcome.done():
                outcome.set_result(refused[0])
        if not concerned:
            level = self._violations.level()
            logger.log(level, "NATS reported a %s: %s", refused[0], NOT_PERMITTED)

    async def advertise(
        self, group: str, subject: str, stats: Callable[[], WorkerStats], prefix: str
    ) -> Subscription | None:
        """Respond to `$SRV` requests for a worker of a group; return None if the server does not allow it."""
        # Names in the service discovery must not contain dots.
        name = group.replace(".", "_").replace("$", "_").replace("=", "_")
        service = {"name": name, "id": token_hex(11)}
        names = ("", f".{name}", f".{name}.{service['id']}")
        subjects = [f"$SRV.{verb}{each}" for verb in ("PING", "INFO", "STATS") for each in names]
        async with AsyncExitStack() as undo:

            async def answer(message: Any) -> None:
                # A response to one of our own addresses would confuse its owner.
                if message.reply and not message.reply.startswith(f"{prefix}."):
                    verb = message.subject.split(".")[1]
                    description = _description(verb, service, subject, stats())
                    await self.publish(message.reply, description)

            async def subscribe() -> None:
                for asked in subjects:
                    subscription = await self.subscribe(asked, cb=answer)  # pyright: ignore[reportUnknownMemberType]
                    undo.push_async_callback(_unsubscribe, subscription)

            refusal = await self.refusal(subjects, subscribe)
            if refusal:
                logger.info("the service discovery of NATS is not used: %s", refusal)
                return None
            return undo.pop_all()

    # ---------------------------------------------------------------------------------------- messages

    def dispatch(
        self, sid: bytes, subject: bytes, reply: bytes, body: bytes, headers: bytes = b""
    ) -> bool:
        """Deliver a message; return False if the library must deliver it."""
        handle = self._handlers.get(sid)
        if handle is None:
            return False
        try:
            handle(body, reply, subject, headers)
        except Exception:  # noqa: BLE001 - no message may stop the reader
            self._log_broken()
        return True

    async def _process_msg(
        self, sid: int, subject: bytes, reply: bytes, data: bytes, headers: bytes
    ) -> None:
        if not self.dispatch(b"%d" % sid, subject, reply, data, headers or b""):
            try:
                await super()._process_msg(sid, subject, reply, data, headers)
            except Exception:  # noqa: BLE001 - no message may stop the reader
                self._log_broken()

    def _log_broken(self) -> None:
        level = self._broken.level()
        logger.log(level, "a message could not be processed", exc_info=True)

    async def request(self, *given: Any, **options: Any) -> Any:
        """Send a request, and wait for its response, as the library does.

        With Python 3.11, the library ignores a cancellation that follows the response in the same iteration of the
        event loop.
        """
        task = cast("asyncio.Task[Any]", asyncio.current_task())
        before = task.cancelling()
        try:
            return await super().request(*given, **options)
        finally:
            if task.cancelling() > before:
                raise asyncio.CancelledError

    async def publish_now(self, subject: str, body: bytes, reply: str = "") -> None:
        """Publish a message to a checked subject; wait only while the output buffer is full.

        Raises:
            TooLargeError: If the server does not accept a message of this size.
            TransportError: If it cannot be sent.
        """
        size = len(body)
        enforce_size(body, self.max_payload)
        try:
            if self.is_connected and self._flush_queue is not None:
                is_idle = self._flush_queue.empty()
                if is_idle:
                    # Only for the first message of each write, because most messages follow another one.
                    enforce_loop(self._home)
                command = b"%b%b\r\n" % (f"PUB {subject} {reply} {size}\r\n".encode(), body)
                self._pending.append(command)
                self._pending_data_size += len(command)
                if self._pending_data_size > self._max_pending_size:
                    await self._flush_pending(force_flush=True)
                elif is_idle:
                    await self._flush_pending()
            else:
                await self.publish(subject, body, reply)
        except NATS_ERRORS as error:
            raise TransportError(f"NATS: {error}") from error

    async def _send_ping(self, future: "asyncio.Future[bool] | None" = None) -> None:
        if self._pending and self.is_connected and self._transport is not None:
            # The library would send the PING before the pending commands, so that a flush would not wait for them.
            self._transport.write(b"".join(self._pending))
            self._pending, self._pending_data_size = [], 0
        await super()._send_ping(future)  # pyright: ignore[reportUnknownMemberType]

    def next_server(self, servers: list[Any], info: dict[str, Any]) -> tuple[Any, float]:
        """Return the next server to connect to: not the last one, whose host may be down."""
        last = self._current_server.uri.netloc if self._current_server else ""
        names = [server.uri.netloc for server in servers]
        start = names.index(last) + 1 if last in names else 0
        return servers[start % len(servers)], self.backoff.pause()

    # ---------------------------------------------------------------------------------------- connection

    async def close(self) -> None:
        """Disconnect. Data that is pending while the connection is lost is dropped."""
        while (
            (task := self._reconnection_task) is not None
            and not task.done()
            and task is not asyncio.current_task()
        ):
            # Repeated, because a timeout of Python 3.11 may swallow a cancellation. The library would stay connected.
            task.cancel()
            await asyncio.wait({task}, timeout=_CLOSE_TIMEOUT)
        if not self.is_connected:
            # The library would write it to the closed socket, which raises on Python 3.13.
            self._hang_up()
        await super().close()
        for task in tuple(self._background):
            task.cancel()
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
        _note_tls(self._transport)

    def _hang_up(self) -> None:
        """Disconnect from a server that rejected us. The library would keep the socket, and might write to it later."""
        transport: Any = self._transport
        self._transport = None
        if transport is not None:
            transport.close()
        if isinstance(transport, WebSocketTransport):
            # Only this closes its session.
            start_task(self._closing, _closed(transport))

    def _refused(self, reason: str, is_first: bool) -> None:
        """Record why a server rejected us.

        Raises:
            TransportError: If there was never a connection, and there is no other server to try.
        """
        address = self._current_server.uri.netloc if self._current_server else ""
        if not is_first and self._refusals.get(address) != reason:
            logger.warning("NATS: %s", reason)
        self._refusals[address] = reason
        if is_first and all(server.netloc in self._refusals for server in self.servers):
            raise TransportError(reason)

    async def _process_info(self, info: dict[str, Any], initial_connection: bool = False) -> None:
        self.requires_certificate = bool(info.get("tls_verify"))
        # Checked before anything is sent; the library uses TLS only if the server requires it.
        if initial_connection and self._wants_tls():
            if not (info.get("tls_required") or info.get("tls_available")):
                raise _NoTLSError(
                    "the server does not support TLS; nothing was sent to it. Use nats:// to connect without TLS"
                )
            info["tls_required"] = True
        await super()._process_info(info, initial_connection)

    def _wants_tls(self) -> bool:
        scheme = self._current_server.uri.scheme if self._current_server else ""
        if self.options["tls_handshake_first"] or scheme in ("ws", "wss"):
            # TLS is already active, or in a lower layer.
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


def _note_tls(transport: Any) -> None:
    """Inform the protocol of a connection that TLS was added to it.

    The library does not, so that asyncio would log a warning at the end of each connection.
    """
    upgraded = getattr(getattr(transport, "_io_writer", None), "transport", None)
    if upgraded is not None and upgraded.get_extra_info("sslcontext") is not None:
        upgraded.get_protocol().connection_made(upgraded)


def _refusal(error: Exception) -> str:
    """Return why a retry cannot succeed; empty if it may."""
    text = str(error)
    if "authorization" in text.lower() or "authentication" in text.lower():
        reason = text.removeprefix("nats: ").strip("'")
        return f"{reason}: the login is wrong, or there is none"
    return text if isinstance(error, (_NoTLSError, SSLCertVerificationError)) else ""


async def _unsubscribe(subscription: Any) -> None:
    with suppress(*NATS_ERRORS, TimeoutError):
        await subscription.unsubscribe()


def _description(verb: str, service: dict[str, str], subject: str, stats: WorkerStats) -> bytes:
    """Return the answer of a worker to a request of the service discovery."""
    version = stats.version if _VERSION.fullmatch(stats.version) else "0.0.0"
    shown: dict[str, Any] = {
        "type": f"io.nats.micro.v1.{verb.lower()}_response",
        **service,
        "version": version,
        "metadata": {},
    }
    endpoint: dict[str, Any] = {"name": "calls", "subject": subject, "queue_group": "workers"}
    if verb == "INFO":
        shown["description"] = "A group of operations workers"
        shown["endpoints"] = [{**endpoint, "metadata": {}}]
    elif verb == "STATS":
        nanoseconds = int(stats.seconds * 1e9)
        started = datetime.fromtimestamp(stats.started_at / 1000, UTC).replace(tzinfo=None)
        shown["started"] = started.isoformat(timespec="milliseconds") + "Z"
        endpoint |= {
            "num_requests": stats.finished,
            "num_errors": stats.failed,
            "last_error": "",
            "processing_time": nanoseconds,
            "average_processing_time": nanoseconds // max(1, stats.finished),
            "data": {
                "running": stats.running,
                "waiting": stats.waiting,
                "refused": stats.refused,
                "queue_time": int(stats.queue_seconds * 1e9),
            },
        }
        shown["endpoints"] = [endpoint]
    return msgspec.json.encode(shown)
