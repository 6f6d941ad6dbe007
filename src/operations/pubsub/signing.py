"""Messages that only those who share a secret can write.

For brokers on which strangers can write: whoever does not know the secret can neither answer a call nor make one.

Rule 1: what is not signed, or not with our secret, or for another queue, or too old, or here for the second time, is
        dropped and counted. It looks as if it had never come.
Rule 2: a signed message is still the JSON of its event, with one member more. What is signed is the text as it is, so
        that nobody has to agree on how to write JSON.
Rule 3: this is about writing. Who may read is for the broker to say, and TLS.
"""

import hmac
import logging
from collections.abc import Callable, Sequence
from time import time

from operations.access import Identity
from operations.pubsub.base import (
    BoundedSet,
    Claim,
    EventTarget,
    LogThrottle,
    QueueAdmin,
    Receiver,
    Subscription,
    admin_of,
)

logger = logging.getLogger("operations")

MAX_AGE = 900.0
"""Seconds after which a message is too old, or too far ahead. Clocks may differ by minutes."""

_MIN_SECRET = 16
_REMEMBERED = 20_000
_START = b',"signed":"'
_END = b'"}'
_STAMP = 13
_LENGTH = len(_START) + _STAMP + 1 + 64 + len(_END)


class Signer:
    """Signs and verifies texts with one secret.

    Raises:
        ValueError: If the secret is too short to be one.
    """

    def __init__(self, secret: str | bytes) -> None:
        key = secret.encode() if isinstance(secret, str) else secret
        if len(key) < _MIN_SECRET:
            raise ValueError(
                f"a secret needs at least {_MIN_SECRET} bytes: take secrets.token_hex(32)"
            )
        self._key = key

    def sign(self, body: bytes, queue: str) -> bytes:
        """`body`, an object in JSON, with its signature inside."""
        stamp = b"%0*d" % (_STAMP, int(time() * 1000))
        signature = self._sign(stamp, queue, body).encode()
        return b"".join((body[:-1], _START, stamp, b".", signature, _END))

    def verify(self, text: bytes, queue: str, seen: BoundedSet) -> bytes | None:
        """The body that was closed; None if it was not, or not by us, or not for here and now."""
        trailer = text[-_LENGTH:]
        if not trailer.startswith(_START) or not trailer.endswith(_END):
            return None
        stamp, _, signature = trailer[len(_START) : -len(_END)].partition(b".")
        body = text[:-_LENGTH] + b"}"
        if not hmac.compare_digest(self._sign(stamp, queue, body).encode(), signature):
            return None
        is_fresh = abs(time() - int(stamp) / 1000) <= MAX_AGE
        return body if is_fresh and seen.add(signature.decode()) else None

    def _sign(self, stamp: bytes, queue: str, body: bytes) -> str:
        message = b"\0".join((stamp, queue.encode(), body))
        return hmac.digest(self._key, message, "sha256").hex()


class SignedTarget:
    """A target all of whose messages are signed. Made by `signed`, or by the `secret` of a connection.

    Attributes:
        forged: Messages that were dropped.
    """

    def __init__(self, target: EventTarget, secret: str | bytes) -> None:
        self.forged = 0
        self._refusals = LogThrottle()
        self.direct = target.direct
        self.broadcasts_replies = target.broadcasts_replies
        self.trusted = target.trusted
        self.signer = Signer(secret)
        self._target = target

    @property
    def identity(self) -> Identity | None:
        """Who is at the other end."""
        return self._target.identity

    @property
    def max_bytes(self) -> int:
        """The largest message that can be carried, without its signature."""
        return self._target.max_bytes - _LENGTH

    @max_bytes.setter
    def max_bytes(self, size: int) -> None:
        self._target.max_bytes = size + _LENGTH

    @property
    def max_values(self) -> int:
        """How many JSON values a message may hold."""
        return self._target.max_values

    @property
    def is_connected(self) -> bool:
        """Whether the other end can be reached now."""
        return self._target.is_connected

    def mailbox(self) -> str:
        """A new private address."""
        return self._target.mailbox()

    def topic(self, name: str) -> str:
        """The public address called `name`."""
        return self._target.topic(name)

    def control(self, name: str) -> str:
        """The address of the workers called `name`."""
        return self._target.control(name)

    async def listen(self, addresses: Sequence[str], receiver: Receiver) -> Subscription:
        """Listen for what is signed."""
        return await self._target.listen(addresses, _Verifying(self, receiver, ""))

    async def consume(
        self,
        queue: str,
        receiver: Receiver,
        capacity: Callable[[], int],
        backlog: int | None = None,
    ) -> Subscription:
        """Take what is signed for this queue."""
        verifying = _Verifying(self, receiver, queue)
        return await self._target.consume(queue, verifying, capacity, backlog)

    async def send(self, address: str, body: bytes) -> None:
        """Sign and send."""
        await self._target.send(address, self.signer.sign(body, ""))

    async def enqueue(
        self, queue: str, body: bytes, *, key: str, reply_to: str, wait: float
    ) -> str:
        """Sign and put."""
        text = self.signer.sign(body, queue)
        return await self._target.enqueue(queue, text, key=key, reply_to=reply_to, wait=wait)

    async def is_present(self, address: str) -> bool:
        """Whether somebody listens at `address`."""
        return await self._target.is_present(address)

    async def count_present(self, address: str) -> int | None:
        """Return how many listen at `address`."""
        return await self._target.count_present(address)

    async def is_waiting(self, queue: str, receipt: str) -> bool:
        """Return whether the broker still keeps a message."""
        return await self._target.is_waiting(queue, receipt)

    @property
    def admin(self) -> QueueAdmin | None:
        """What an operator sees of the broker."""
        return admin_of(self._target)

    async def dead_letter(self, queue: str, body: bytes) -> None:
        """Keep a message, unsigned: it is for people to look at, and not to be taken again."""
        await self._target.dead_letter(queue, body)

    def refuse(self) -> None:
        """Count a message that was dropped. Whoever sent it hears nothing, so it is told here."""
        self.forged += 1
        logger.log(
            self._refusals.level(),
            "a message was dropped: it is not signed with our secret, or not for here and now. Workers and callers "
            "need the same secret=, or none (%d dropped so far)",
            self.forged,
        )


class _Verifying:
    """Lets through to a receiver what is signed."""

    def __init__(self, target: SignedTarget, receiver: Receiver, queue: str) -> None:
        self._target = target
        self._receiver = receiver
        self._queue = queue
        self._seen = BoundedSet(_REMEMBERED)
        self.undelivered = receiver.undelivered
        self.lost = receiver.lost
        self.restored = receiver.restored

    def receive(
        self,
        body: bytes,
        reply_to: str,
        age: float = 0.0,
        claim: Claim | None = None,
        sender: str = "",
    ) -> None:
        """Pass on a message that is signed; remove any other from its queue."""
        opened = self._target.signer.verify(body, self._queue, self._seen)
        if opened is not None:
            self._receiver.receive(opened, reply_to, age, claim, sender)
            return
        self._target.refuse()
        if claim is not None:
            claim.remove()


def signed(target: EventTarget, secret: str | bytes | None) -> EventTarget:
    """`target` with all of its messages signed with `secret`; as it is where there is none.

    Raises:
        ValueError: If the secret is too short to be one.
    """
    return target if secret is None else SignedTarget(target, secret)
