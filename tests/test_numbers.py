"""Measured numbers are outdated by changes of the code that they measure, and not by other words."""

from pathlib import Path
from typing import Any

import pytest
from tests.support import script

CODE = '''"""Add numbers."""

import os


def add(a: int, b: int = 1) -> str:
    """Return a sum."""
    # A comment.
    return f"{a + b} # größer"  # Another comment.
'''


@pytest.fixture
def source(tmp_path: Path) -> Path:
    for folder in ("base", "schema", "contract", "registry", "server"):
        (tmp_path / folder).mkdir()
    (tmp_path / "base/adding.py").write_text(CODE)
    return tmp_path


def tables(source: Path, **more: Any) -> dict[str, Any]:
    code = script("measured_code").code_of("scripts/bench core", source)
    return {"core: add": {"command": "scripts/bench core", "code": code, **more}}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("A comment.", "Other words."),
        ("# A comment.\n    ", ""),
        ("Return a sum.", "Return the sum of two\n    numbers."),
        ("import os", "from os import path, sep"),
        ("a: int, b: int = 1", "\n    a: int,\n    b: int = 1\n"),
    ],
)
def test_other_words_do_not_outdate_a_number(source: Path, old: str, new: str) -> None:
    before = tables(source)
    assert old in CODE
    (source / "base/adding.py").unlink()
    (source / "registry/sums.py").write_text(CODE.replace(old, new))
    (source / "server/other.py").write_text("x = 1")

    assert script("measured_code").outdated(before, source) == []


@pytest.mark.parametrize(
    ("old", "new"), [("a + b", "b + a"), ("= 1", "= 2"), ("größer", "kleiner"), ("# g", "g")]
)
def test_other_code_outdates_a_number_until_the_pages_say_so(
    source: Path, old: str, new: str
) -> None:
    before, admitted = tables(source), tables(source, changed=True)
    assert old in CODE
    (source / "base/adding.py").write_text(CODE.replace(old, new))

    assert script("measured_code").outdated(before, source) == ["core: add"]
    assert script("measured_code").outdated(admitted, source) == []


def test_a_page_says_that_the_measured_code_has_changed(source: Path) -> None:
    about = {"date": "2026-11-16", "machine": "2 cores", "rows": {"ours": {"us": 2.0}}}
    numbers = script("doc_numbers")

    assert "changed since" not in numbers.table({"tables": tables(source, **about)}, "core: add")
    marked = {"tables": tables(source, changed=True, **about)}
    assert "2 cores; the measured code has changed since*" in numbers.table(marked, "core: add")


def test_every_benchmark_names_the_folders_that_it_measures() -> None:
    measured = script("measured_code")
    benchmarks = Path(__file__).parents[1] / "benchmarks"

    assert {path.stem for path in benchmarks.glob("[!_]*.py")} == set(measured.MEASURED)
    for folders in measured.MEASURED.values():
        for folder in folders:
            assert any((measured.SOURCE / folder).rglob("*.py")), folder


def test_the_page_of_fixed_limits_has_the_constants_of_the_code() -> None:
    limits = script("fixed_limits")
    text = limits.PAGE.read_text(encoding="utf-8")

    assert not limits.missing(text)
    assert limits.filled(text) == text
    outdated = text.replace("| 64 |", "| 65 |")
    assert outdated != text
    assert limits.filled(outdated) == text
