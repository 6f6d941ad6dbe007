"""Sign messages with a shared secret, for brokers on which other clients can write.

Rule 1: a message is valid once, at one address and for a limited time. A message is dropped and counted if it is not
        signed with the secret, is for another address, is too old, or repeats or precedes later messages of its sender.
Rule 2: a signed message is the JSON of its event with one additional member. The signature covers the exact text, so no
        canonical form of JSON is needed.
Rule 3: the address for replies is the one in the signed event. An address that the transport adds is ignored.
Rule 4: signing protects against forged messages. To protect against readers, use permissions and TLS.
"""

import hmac
import logging
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from heapq import nlargest
from itertools import count
from secrets import token_hex
from time import time
from typing import Any, cast

import msgspec

from operations.base.logs import LogThrottle
from operations.pubsub.base import Consumer, Delivery, EventTarget, Receiver, Subscription

logger = logging.getLogger("operations")

MAX_AGE = 900.0
"""The largest difference in seconds between the time of a message and the local clock. Clocks may differ by minutes."""

SIGNING_ADVICE = (
    "Workers and callers need the same secret=, or none, and clocks that differ by less than"
    f" {MAX_AGE / 60:g} minutes"
)

_MIN_SECRET = 16

WINDOW = 4096
"""The least number of stored message numbers of one sender. A message may be overtaken by as many others."""

_MAX_SENDERS = 1024
"""The number of stored senders after which senders with only expired messages are removed."""

_START = b',"signed":"'
_END = b'"}'
_EPOCH, _NUMBER, _STAMP = 16, 15, 13
_HEAD = _EPOCH + 1 + _NUMBER + 1 + _STAMP
_LENGTH = len(_START) + _HEAD + 1 + 64 + len(_END)


class Signer:
    """Signs and verifies texts with one secret.

    Every signer numbers its messages within its own epoch; a restarted process begins a new epoch.

    Raises:
        ValueError: If the secret is too short.
    """

    def __init__(self, secret: str | bytes) -> None:
        key = secret.encode() if isinstance(secret, str) else secret
        if len(key) < _MIN_SECRET:
            raise ValueError(
                f"a secret needs at least {_MIN_SECRET} bytes: use secrets.token_hex(32)"
            )
        self._key = key
        self._epoch = token_hex(_EPOCH // 2).encode()
        self._numbers = count(1)

    def sign(self, body: bytes, address: str) -> bytes:
        """Return `body`, a JSON object, with its signature for one address."""
        number, stamp = next(self._numbers), int(time() * 1000)
        head = b"%b.%0*d.%0*d" % (self._epoch, _NUMBER, number, _STAMP, stamp)
        signature = self._sign(head, address, body).encode()
        return b"".join((body[:-1], _START, head, b".", signature, _END))

    def verify(self, text: bytes, address: str, senders: "Senders") -> bytes | None:
        """Return the body of a message that is signed for `address` and valid now; otherwise None."""
        trailer = text[-_LENGTH:]
        if not trailer.startswith(_START) or not trailer.endswith(_END):
            return None
        signed = trailer[len(_START) : -len(_END)]
        head, signature = signed[:_HEAD], signed[_HEAD + 1 :]
        body = text[:-_LENGTH] + b"}"
        if not hmac.compare_digest(self._sign(head, address, body).encode(), signature):
            return None
        epoch, number, stamp = head.split(b".")
        sent_at = int(stamp) / 1000
        is_fresh = abs(time() - sent_at) <= MAX_AGE
        return body if is_fresh and senders.add(epoch, int(number), sent_at) else None

    def _sign(self, head: bytes, address: str, body: bytes) -> str:
        message = b"\0".join((head, address.encode(), body))
        return hmac.digest(self._key, message, "sha256").hex()


class _Sender:
    """The received message numbers of one sender. Numbers below a floor are not accepted."""

    __slots__ = ("floor", "last_sent_at", "seen")

    def __init__(self) -> None:
        self.seen: set[int] = set()
        self.floor = 0
        self.last_sent_at = 0.0

    def add(self, number: int, sent_at: float) -> bool:
        if number <= self.floor or number in self.seen:
            return False
        self.seen.add(number)
        self.last_sent_at = max(self.last_sent_at, sent_at)
        if len(self.seen) >= 2 * WINDOW:
            self.seen = set(nlargest(WINDOW, self.seen))
            self.floor = min(self.seen) - 1
        return True


class Senders:
    """The messages received at one address, by the epochs of their senders."""

    def __init__(self) -> None:
        self._by_epoch: dict[bytes, _Sender] = {}
        self._limit = _MAX_SENDERS

    def __len__(self) -> int:
        return len(self._by_epoch)

    def add(self, epoch: bytes, number: int, sent_at: float) -> bool:
        """Record a message; return False if it has, or may have, arrived before."""
        sender = self._by_epoch.get(epoch)
        if sender is None:
            if len(self._by_epoch) >= self._limit:
                self._forget()
            sender = self._by_epoch[epoch] = _Sender()
        return sender.add(number, sent_at)

    def _forget(self) -> None:
        """Remove senders whose messages have all expired."""
        oldest = time() - MAX_AGE
        kept = {name: each for name, each in self._by_epoch.items() if each.last_sent_at >= oldest}
        self._by_epoch = kept
        self._limit = max(_MAX_SENDERS, 2 * len(kept))


class SignedTarget:
    """An event target that signs all messages of another target, and has its other members.

    Created by `signed`, or by the `secret` of a connection. Dead letters are stored without a signature, because
    operators inspect them and workers do not read them again.

    Attributes:
        forged: Messages that were dropped.
    """

    def __init__(self, target: EventTarget, secret: str | bytes) -> None:
        self.forged = 0
        self.signer = Signer(secret)
        self._refusals = LogThrottle()
        self._target = target

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)

    @property
    def max_bytes(self) -> int:
        """The largest message in bytes, without its signature."""
        return self._target.max_bytes - _LENGTH

    async def listen(self, addresses: Sequence[str], receiver: Receiver) -> Subscription:
        """Listen for messages that are signed for these addresses."""
        async with AsyncExitStack() as undo:
            for number, address in enumerate(addresses):
                verifying = _Verifying(self, receiver, address, is_first=number == 0)
                subscription = await self._target.listen((address,), cast("Receiver", verifying))
                undo.push_async_callback(subscription.aclose)
            return undo.pop_all()

    async def consume(self, queue: str, consumer: Consumer) -> Subscription:
        """Receive requests that are signed for this queue."""
        verifying = _Verifying(self, consumer, _queue(queue), is_first=True)
        return await self._target.consume(queue, cast("Consumer", verifying))

    async def send(self, address: str, body: bytes) -> None:
        """Sign and send a message."""
        await self._target.send(address, self.signer.sign(body, address))

    async def enqueue(
        self, queue: str, body: bytes, *, key: str, reply_to: str, wait: float, worker: str = ""
    ) -> str:
        """Sign and enqueue a request."""
        text = self.signer.sign(body, worker or _queue(queue))
        return await self._target.enqueue(
            queue, text, key=key, reply_to=reply_to, wait=wait, worker=worker
        )

    def refuse(self) -> None:
        """Count and log a dropped message; its sender receives no reply."""
        self.forged += 1
        logger.log(
            self._refusals.level(),
            "a message was dropped: its signature is missing, wrong, repeated, old or for another address. %s"
            " (%d dropped so far)",
            SIGNING_ADVICE,
            self.forged,
        )


class _Verifying:
    """Passes signed messages to a receiver or consumer, and has its other members.

    Args:
        target: Verifies messages, and counts the rejected ones.
        receiver: Receives the verified messages.
        address: The address that messages must be signed for.
        is_first: Whether this object reports connection changes to a receiver that listens at several addresses.
    """

    def __init__(
        self, target: SignedTarget, receiver: Receiver, address: str, *, is_first: bool
    ) -> None:
        self._target = target
        self._receiver = receiver
        self._address = address
        self._senders = Senders()
        if not is_first:
            self.lost: Callable[..., None] = lambda *_: None
            self.restored = self.lost

    def __getattr__(self, name: str) -> Any:
        return getattr(self._receiver, name)

    def receive(self, delivery: Delivery) -> None:
        """Pass a signed message to the receiver; remove any other message from its queue."""
        opened = self._target.signer.verify(delivery.body, self._address, self._senders)
        if opened is not None:
            self._receiver.receive(msgspec.structs.replace(delivery, body=opened, reply_to=""))
            return
        self._target.refuse()
        if delivery.claim is not None:
            delivery.claim.remove()


def _queue(name: str) -> str:
    """Return the signed address of a request; no address contains a space."""
    return f"queue {name}"


def signed(target: EventTarget, secret: str | bytes | None) -> EventTarget:
    """Return `target` with all messages signed with `secret`; unchanged if there is none.

    Raises:
        ValueError: If the secret is too short.
    """
    return target if secret is None else cast("EventTarget", SignedTarget(target, secret))
