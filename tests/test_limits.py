"""The limits of tests grow with the machine."""

import os

import pytest
from tests import limits


def test_limits_are_never_shorter_than_on_an_idle_machine() -> None:
    assert limits.scaled(20) >= 20


def test_limits_grow_with_the_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_slowness", lambda: 1.0)
    monkeypatch.setattr(limits, "_runnable", lambda: 0)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(os, "getloadavg", lambda: (20.0, 1.0, 1.0))
    assert limits.scaled(3) == 30

    monkeypatch.setattr(os, "getloadavg", lambda: (0.5, 20.0, 20.0))
    assert limits.scaled(3) == 3
    monkeypatch.setattr(limits, "_runnable", lambda: 8)
    assert limits.scaled(3) == 12


def test_the_limit_of_a_whole_test_is_scaled(request: pytest.FixtureRequest) -> None:
    mark = request.node.get_closest_marker("timeout")
    assert mark.args[0] >= float(request.config.getini("timeout"))
