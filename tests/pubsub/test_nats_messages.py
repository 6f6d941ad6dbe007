"""Messages of NATS, as they are read from the connection."""

import asyncio

import pytest
from nats.errors import ProtocolError
from tests.receivers import SilentReceiver
from tests.servers import NatsServer, proxy, running

from operations.pubsub.nats import connect_nats
from operations.pubsub.nats.client import ReconnectingClient

LARGE = b"x" * 100_000


def listening() -> tuple[ReconnectingClient, list[tuple[bytes, str, str]]]:
    """Return a client with the subscription 7, and the messages that it takes."""
    client, taken = ReconnectingClient(), list[tuple[bytes, str, str]]()

    def take(body: bytes, reply: bytes, subject: bytes, _: bytes) -> None:
        taken.append((body, reply.decode(), subject.decode()))

    client._handlers[b"7"] = take
    return client, taken


@pytest.mark.requirement("R35")
@pytest.mark.parametrize("size", [1, 2, 3, 7, 50, 32_768, 1_000_000])
async def test_messages_are_read_however_they_are_cut(size: int) -> None:
    client, taken = listening()
    text = b"".join(
        (
            b"MSG box.a 7 reply.to 5\r\nhello\r\n",
            b"MSG box.b 7 11\r\nwith\r\nlines\r\n",
            b"+OK\r\n",
            b"MSG box.c 7 %d\r\n%b\r\n" % (len(LARGE), LARGE),
            b"MSG box.d 7 20\r\nMSG box.x 7 3\r\nabc\r\n\r\n",
            b"MSG unknown 8 3\r\nabc\r\n",
            b"MSG box.e 7 1\r\n!\r\n",
        )
    )
    if size < 50:
        text = text.replace(LARGE, b"x" * 100).replace(b"100000", b"100")

    for start in range(0, len(text), size):
        await client._ps.parse(text[start : start + size])

    assert [(subject, reply) for _, reply, subject in taken] == [
        ("box.a", "reply.to"),
        *((f"box.{name}", "") for name in "bcde"),
    ]
    assert [body for body, _, _ in taken][:2] == [b"hello", b"with\r\nlines"]
    assert taken[2][0].strip(b"x") == b""
    assert len(taken[2][0]) == (100 if size < 50 else len(LARGE))
    assert taken[3][0] == b"MSG box.x 7 3\r\nabc\r\n"


@pytest.mark.requirement("R35")
@pytest.mark.parametrize(
    "text", [b"MSG box.a 7 many\r\nhello\r\n", b"MSG box.a\r\n", b"MESSAGE\r\n"]
)
async def test_text_outside_the_protocol_is_an_error(text: bytes) -> None:
    client, taken = listening()

    with pytest.raises(ProtocolError):
        await client._ps.parse(text)

    assert taken == []


@pytest.mark.requirement("R35")
async def test_a_message_that_cannot_be_processed_does_not_stop_the_next_ones(
    caplog: pytest.LogCaptureFixture,
) -> None:
    client, taken = listening()

    await client._ps.parse(b"MSG box.\xff 7 1\r\na\r\nMSG box.b 7 1\r\nb\r\n")

    assert [body for body, _, _ in taken] == [b"b"]
    assert "could not be processed" in caplog.text


async def test_messages_are_accepted_until_the_server_has_ended_a_subscription() -> None:
    """The response to a PING that overtakes the end of the subscription can be followed by messages."""
    with running(NatsServer()) as broker:
        async with (
            proxy(broker.port) as link,
            connect_nats(f"nats://127.0.0.1:{link.port}") as target,
        ):
            listening = await target.listen([target.control("worker")], SilentReceiver())
            link.heard.clear()
            await listening.aclose()

            assert link.heard.rindex(b"UNSUB") < link.heard.rindex(b"PING")


async def test_a_cancellation_just_after_the_response_is_not_lost() -> None:
    client = ReconnectingClient()
    with running(NatsServer()) as server:
        await client.connect(server.url)
        try:
            asking = asyncio.create_task(client.request("nobody.listens", b"", timeout=5))
            while not client._resp_map:
                await asyncio.sleep(0)
            (response,) = client._resp_map.values()
            await asyncio.sleep(0)
            response.add_done_callback(lambda _: asking.cancel())
            await asyncio.wait({asking})
        finally:
            await client.close()

    assert response.done()
    assert asking.cancelled()
