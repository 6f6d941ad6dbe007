"""What every test folder shares."""

from pathlib import Path

import pytest

from operations import OperationRegistry

PROJECT = Path(__file__).resolve().parent.parent


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def registry() -> OperationRegistry:
    return OperationRegistry()
