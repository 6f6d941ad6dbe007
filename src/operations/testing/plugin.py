"""A pytest plugin: `pytest_plugins = ["operations.testing.plugin"]` in a `conftest.py`."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from operations.registry.registry import OperationRegistry
from operations.testing import RegistryUnderTest


@pytest.fixture
def under_test() -> Iterator[Callable[[OperationRegistry], RegistryUnderTest]]:
    """Return a function that puts a registry under test; its operations are restored after the test."""
    with ExitStack() as stack:
        yield lambda registry: stack.enter_context(RegistryUnderTest(registry))
