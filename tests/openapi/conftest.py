"""What the OpenAPI tests share."""

import socket
from collections.abc import Iterator

import pytest
from tests.openapi.echo import Echo, running_echo


@pytest.fixture(scope="session")
def echo() -> Iterator[Echo]:
    with running_echo() as server:
        yield server


@pytest.fixture
def unused_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
