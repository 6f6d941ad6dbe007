"""A clock that tests may change."""

import pytest

from operations import _grants


@pytest.fixture(autouse=True)
def _own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    # The latest time that one test made up is not the time of the next one.
    monkeypatch.setattr(_grants, "_latest", _grants._latest)
