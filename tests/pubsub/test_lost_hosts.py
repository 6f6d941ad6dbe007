"""Hosts that are gone without a word: their connections stay open, and nothing comes through them."""

import re
from pathlib import Path

import pytest

from operations.pubsub.config import NatsConfig
from operations.pubsub.nats.queues import _ASK_EVERY
from operations.pubsub.redis.connection import KEEPALIVE
from operations.pubsub.redis.servers import SILENCE

RECIPE = Path(__file__).resolve().parents[2] / "docs" / "recipes" / "nats.conf"


@pytest.mark.requirement("R35", "F6")
def test_a_lost_host_is_detected_within_20_seconds() -> None:
    login = NatsConfig().login
    (server_interval,) = re.findall(r'ping_interval: "(\d+)s"', RECIPE.read_text("utf-8"))
    (server_pings,) = re.findall(r"ping_max: (\d+)", RECIPE.read_text("utf-8"))

    assert login["ping_interval"] * (login["max_outstanding_pings"] + 1) < 20
    assert int(server_interval) * (int(server_pings) + 1) < 20
    assert KEEPALIVE + SILENCE < 20
    # A caller asks for the workers of a plain queue, and misses those that did not answer when it asks again.
    assert 2 * _ASK_EVERY < 20
