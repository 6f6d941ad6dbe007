"""Addresses that lead nowhere: one clear error, and no secret in it."""

import traceback

import pytest

from operations.errors import TransportError
from operations.pubsub.nats import connect_nats
from operations.pubsub.websocket import connect_websocket


@pytest.mark.requirement("R16")
@pytest.mark.parametrize(
    "url",
    [
        "ws://user:SEKRIT@127.0.0.1:1/ws",
        "ws://127.0.0.1:1/ws?token=SEKRIT",
        "http://user:SEKRIT@127.0.0.1:1/",
    ],
)
async def test_a_websocket_that_is_not_there(url: str) -> None:
    with pytest.raises(TransportError) as caught:
        async with connect_websocket(url):
            pass
    assert "SEKRIT" not in str(caught.value)
    assert "SEKRIT" not in "".join(traceback.format_exception(caught.value))


async def test_a_nats_address_that_cannot_be_read() -> None:
    with pytest.raises(TransportError, match="NATS cannot be reached"):
        async with connect_nats("nats://user:SEKRIT@127.0.0.1:none"):
            pass
