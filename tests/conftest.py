"""What every test folder shares."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from operations import OperationRegistry

PROJECT = Path(__file__).resolve().parent.parent

# How long an example takes says more about the machine than about the code.
settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("default")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def registry() -> OperationRegistry:
    return OperationRegistry()
