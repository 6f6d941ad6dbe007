"""A clock that tests may change."""

import pytest

from operations import access


@pytest.fixture(autouse=True)
def _own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    # The latest time that one test made up is not the time of the next one.
    monkeypatch.setattr(access, "_latest", access._latest)
