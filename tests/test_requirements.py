"""Every promise of docs/security.md has a test, and every test that names a promise names one of these."""

import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version

import pytest
from packaging.requirements import Requirement
from packaging.version import Version
from tests.conftest import PROJECT
from tests.load import REPEATED
from tests.support import installed_by

TESTS = PROJECT / "tests"
ROW = re.compile(r"^\| (R\d\d|F\d+) \|.*\| ([^|]*) \|$", re.MULTILINE)
MARK = re.compile(r'mark\.requirement\(((?:\s*"\w+",?)+\s*)\)')

PENDING: dict[str, str] = {}
"""Promises that are not kept yet, and why. Remove a row when its test exists."""


def _promised() -> dict[str, list[str]]:
    """Return the test files that docs/security.md names for each promise."""
    page = (PROJECT / "docs" / "security.md").read_text(encoding="utf-8")
    return {row: re.findall(r"`([^`]+)`", files) for row, files in ROW.findall(page)}


@cache
def _marked() -> dict[str, set[str]]:
    """Return the files of the tests that are marked with each id."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for path in TESTS.rglob("*.py"):
        for name in _ids(path.read_text(encoding="utf-8")):
            found[name].add(path.relative_to(TESTS).as_posix())
    return dict(found)


def _ids(source: str) -> Iterator[str]:
    for ids in MARK.findall(source):
        yield from re.findall(r"\w+", ids)


def test_the_table_has_every_id() -> None:
    expected = [f"R{n:02}" for n in range(1, 65)] + [f"F{n}" for n in range(1, 35)]
    listed = list(_promised())

    assert set(expected) <= set(listed)
    assert listed == sorted(listed, key=lambda row: (row[0] == "F", int(row[1:])))


def test_every_attack_has_its_test() -> None:
    page = (PROJECT / "docs" / "security.md").read_text(encoding="utf-8")
    rows = page.partition("## Attacks")[2].partition("\n## ")[0].split("\n| ")[2:]
    assert len(rows) > 25
    for row in rows:
        named = re.findall(r"`(\w+/\w+\.py)(?:::(\w+))?`", row.rpartition(" | ")[2])
        assert named, row
        for file, test in named:
            source = (TESTS / file).read_text(encoding="utf-8")
            assert not test or f"def {test}(" in source, f"{file} has no {test}"


def test_every_promise_has_a_test_and_every_marker_a_promise() -> None:
    promised, marked = set(_promised()), set(_marked())

    assert promised - marked - set(PENDING) == set(), "promises without a test"
    assert marked - promised == set(), "markers that name no promise"
    assert set(PENDING) - promised == set(), "pending ids that are no promises"
    assert set(PENDING) & marked == set(), "pending promises that have a test by now"


def test_the_table_names_tests_that_verify_the_promise() -> None:
    marked = _marked()
    for row, files in _promised().items():
        assert bool(files) != (row in PENDING), f"{row}: name a test file, or `pending`"
        for file in files:
            assert file in marked[row], f"{file} has no test of {row}; see {sorted(marked[row])}"


@pytest.mark.parametrize("name", REPEATED)
def test_every_test_that_is_repeated_exists_and_has_a_reason(name: str) -> None:
    file, _, test = name.partition("::")

    assert f"def {test}(" in (TESTS / file).read_text(encoding="utf-8")
    assert len(REPEATED[name].split()) > 5


def test_the_security_policy_points_to_the_threat_model() -> None:
    policy = (PROJECT / "SECURITY.md").read_text(encoding="utf-8")

    assert "(docs/security.md)" in policy
    assert "Supported versions" in policy


FLOORS = {
    "aiohttp": "3.13.4",
    "mcp": "2.2",
    "starlette": "1.0.1",
    "python-multipart": "0.0.27",
    "pyjwt": "2.12",
    "redis": "4.5.4",
    "urllib3": "2.7",
}
"""The first versions with known security fixes."""


def _declared() -> dict[str, Requirement]:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lists = [project["dependencies"], *project["optional-dependencies"].values()]
    requirements = [Requirement(text) for texts in lists for text in texts]
    return {requirement.name: requirement for requirement in requirements}


@pytest.mark.requirement("R51")
@pytest.mark.parametrize("name", FLOORS)
def test_r51_versions_with_known_vulnerabilities_cannot_be_installed(name: str) -> None:
    floor = Version(FLOORS[name])
    if name not in installed_by(*map(str, _declared().values())):
        assert name not in _declared()
        return
    declared = _declared().get(name)

    assert declared is not None, f"{name} is installed by a dependency: declare {name}>={floor}"
    lowest = [Version(each.version) for each in declared.specifier if each.operator == ">="]
    assert lowest
    assert lowest[0] >= floor
    assert Version(version(name)) >= floor


def test_the_scan_finds_markers_in_every_form() -> None:
    # Not written out, so that the scan of this file does not find them.
    mark = "pytest.mark.requirement"
    source = (
        f'pytestmark = {mark}("R01")\n'
        f'@{mark}("R02", "F3")\n'
        "def test_a() -> None: ...\n"
        f'ROWS = [pytest.param(1, marks={mark}(\n    "R04",\n    "F5",\n))]\n'
    )

    assert sorted(_ids(source)) == ["F3", "F5", "R01", "R02", "R04"]
