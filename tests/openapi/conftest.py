"""What the OpenAPI tests share."""

from collections.abc import Iterator

import pytest
from tests.openapi.echo import Echo, running_echo
from tests.servers import free_port


@pytest.fixture(scope="session")
def echo() -> Iterator[Echo]:
    with running_echo() as server:
        yield server


@pytest.fixture
def unused_port() -> int:
    return free_port()
