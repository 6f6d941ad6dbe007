"""`operations list` and `operations show`."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cli.conftest import Ran

from operations import OPERATION_SPEC_SCHEMA

Run = Callable[..., Ran]


def ids(ran: Ran) -> list[str]:
    return [line.partition("\t")[0] for line in ran.out.splitlines()]


def test_a_pipe_gets_one_line_per_operation_with_tabs(run: Run) -> None:
    lines = run("list").out.splitlines()

    assert len(lines) == 12
    assert "work.add\tquery\tlocal\tAdd two numbers." in lines


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--type", "subscription"], ["work.count", "work.steps"]),
        (["--tag", "maths"], ["work.add"]),
        (["add", "numbers", "--limit", "1"], ["work.add"]),
        (["--namespace", "nope"], []),
        (["--source", "mcp"], []),
    ],
)
def test_lists_are_searched_and_filtered(
    run: Run, arguments: list[str], expected: list[str]
) -> None:
    assert ids(run("list", *arguments)) == expected
    assert run("list", *arguments, "--ids").out.split() == expected


@pytest.mark.requirement("R07")
def test_a_caller_sees_what_it_may_call(run: Run) -> None:
    assert "work.secret" in ids(run("list"))
    assert "work.secret" in ids(run("list", "--as", "alice"))
    assert "work.secret" not in ids(run("list", "--as", "bob"))
    assert run("show", "work.secret", "--as", "anonymous").code == 4


def test_a_list_is_json_for_scripts(run: Run) -> None:
    rows = run("list", "--json", "--type", "query").json

    assert {"id": "work.add", "type": "query", "source": "local"}.items() <= rows[0].items()


def test_show_draws_schemas_access_errors_and_origin(run: Run) -> None:
    shown = run("show", "work.ship").out

    for words in (
        "Ship it",
        "Where it goes.",
        "street  string",
        "number?  integer = 1",
        "small | large",
        "ops.py",
    ):
        assert words in shown
    assert "operations call work.ship to=... size=... notes=..." in shown
    assert "needs all of work:admin" in run("show", "work.secret").out
    assert "TIRED" in run("show", "work.fail").out


def test_show_is_the_spec_for_scripts(run: Run) -> None:
    assert OPERATION_SPEC_SCHEMA.errors(run("show", "work.ship", "--json").json) == []


def test_a_source_that_fails_costs_no_other_anything(run: Run, folder: Path) -> None:
    config = (folder / "operations.toml").read_text()
    (folder / "broken.py").write_text("import nothing_of_the_kind")
    (folder / "broken.yaml").write_text("openapi: [")
    (folder / "operations.toml").write_text(
        config.replace('["ops.py"]', '["ops.py", "broken.py", "no_such_package"]')
        + "\n[openapi.shop]\ndocument = 'broken.yaml'\n[mcp.gone]\ncommand = 'no-such-program'\n"
    )

    ran = run("list")

    assert len(ids(ran)) == 12
    assert ran.code == 0
    for words in (
        "nothing_of_the_kind",
        "no_such_package",
        "openapi:shop is not there",
        "mcp:gone is not there",
    ):
        assert words in ran.err
    asked = run("call", "shop.anything", "--json")
    assert asked.code == 8
    assert asked.error["code"] == "UNAVAILABLE"
