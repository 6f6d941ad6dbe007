"""`operations list` and `operations show`."""

import re
import shlex
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


def test_a_truncated_list_is_marked(run: Run) -> None:
    ran = run("list", "--limit", "2", "--ids")

    assert len(ran.out.split()) == 2
    assert ran.err == "... and 10 more\n"
    assert run("list", "--limit", "12").err == ""


@pytest.mark.requirement("R07")
def test_a_caller_sees_operations_that_it_may_call(run: Run) -> None:
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
    assert "operations call work.ship to.street=... size=... notes=..." in shown
    assert "requires scope: work:admin" in run("show", "work.secret").out
    assert "TIRED" in run("show", "work.fail").out


LIMITED = """
from typing import Annotated, Literal
from msgspec import Meta
from operations import AccessControl, operation

@operation("limits.of", access=AccessControl(["a", "b"], ["c", "d"], "project", "edit", "/code"))
async def of(
    stars: Annotated[int, Meta(ge=1, le=5)],
    code: Annotated[str, Meta(pattern="^[a-z]+$", max_length=8)],
    tags: list[Literal["red", "green", None]],
    price: Annotated[float, Meta(gt=0)] | None = None,
    sizes: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(min_length=1)] = [1],
) -> Annotated[int, Meta(multiple_of=5)] | None:
    return 5
"""


def test_show_prints_ranges_patterns_null_and_enums_inside_lists(run: Run, folder: Path) -> None:
    (folder / "limits.py").write_text(LIMITED)
    (folder / "other.toml").write_text("modules = ['limits.py']")

    shown = run("show", "limits.of", "--config", "other.toml").out

    for line in (
        "requires scopes: a, b; one of the scopes: c, d; edit on the project at /code of the input",
        "stars  integer (1 to 5)",
        "code  string (at most 8 characters, matching ^[a-z]+$)",
        "tags  list of (red | green | null)",
        "price?  number or null (more than 0) = null",
        "sizes?  list of integer (at least 1 item, each at least 0) = [1]",
        "integer or null (a multiple of 5)",
    ):
        assert line in shown


def test_show_truncates_nothing(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    words = "A parameter whose description goes on and on, well beyond the edge of any terminal there is."
    (folder / "long.py").write_text(
        "from operations import operation\n\n\n"
        "@operation('long.run')\nasync def run(a: int) -> int:\n"
        f'    """Do it.\n\n    Args:\n        a: {words}\n    """\n    return a\n'
    )
    (folder / "other.toml").write_text("modules = ['long.py']")

    shown = run("show", "long.run", "--config", "other.toml").out

    assert f"a  integer  {words}\n" in shown
    assert [line for line in shown.splitlines() if line.endswith(" ")] == []


def test_a_hint_finds_the_same_config(run: Run, folder: Path) -> None:
    (folder / "my other.toml").write_text((folder / "operations.toml").read_text())

    shown = run("show", "work.add", "--config", "my other.toml").out
    hint = shown.splitlines()[-1]
    assert hint == "  operations call --config 'my other.toml' work.add a=..."
    (folder / "operations.toml").unlink()
    assert run(*shlex.split(hint.replace("...", "1"))[1:]).json == 2

    (folder / "my other.toml").write_text("[openapi.shop]\ndocument = 'shop.json'")
    (folder / "shop.json").write_text(
        '{"openapi": "3.1.0", "paths": {"/a": {"get": {"parameters": [{"in": "nowhere", "name": "x"}]}}}}'
    )
    warning = run("list", "--config", "my other.toml").err.splitlines()[-1]
    assert "openapi:shop: 1 part cannot be used" in warning
    (hint,) = re.findall("`operations (.*)`", warning)
    assert "1 part cannot be used:" in run(*shlex.split(hint)).out


def test_show_is_the_spec_for_scripts(run: Run) -> None:
    assert OPERATION_SPEC_SCHEMA.errors(run("show", "work.ship", "--json").json) == []


def test_a_source_that_fails_does_not_affect_others(run: Run, folder: Path) -> None:
    config = (folder / "operations.toml").read_text()
    (folder / "broken.py").write_text("import nothing_of_the_kind")
    (folder / "broken.yaml").write_text("openapi: [")
    (folder / "operations.toml").write_text(
        config.replace('["ops.py"]', '["ops.py", "broken.py", "no_such_package"]')
        + "\n[openapi.shop]\ndocument = 'broken.yaml'\n[mcp.gone]\ncommand = 'no-such-program'\n"
    )

    ran = run("list")

    assert len(ids(ran)) == 12
    assert ran.code == 3  # a module that does not exist is an error of the config
    for words in (
        "nothing_of_the_kind",
        "no_such_package",
        "openapi:shop is not available",
        "mcp:gone is not available",
    ):
        assert words in ran.err
    result = run("call", "shop.anything", "--json")
    assert result.code == 8
    assert result.error["code"] == "UNAVAILABLE"


ODD = """
from operations import Operation, OperationSpec, from_schema


def made(name, **schema):
    async def handler(input, context):
        return input

    schema = from_schema(schema)
    return Operation(
        OperationSpec(namespace="odd", name=name, type="query", input_schema=schema), handler
    )


ANY = made("any")
WORD = made("word", type="string")
NAMES = made("names", type="object", required=["a b"], properties={"a b": {"type": "string"}})
"""


@pytest.mark.parametrize(
    ("operation_id", "shown"),
    [
        ("odd.any", ""),
        ("odd.word", " ..."),
        ("odd.names", " 'a b=...'"),
        ("work.ship", " to.street=... size=... notes=..."),
    ],
)
def test_show_ends_with_a_call_to_copy(
    run: Run, folder: Path, operation_id: str, shown: str
) -> None:
    (folder / "odd.py").write_text(ODD)
    (folder / "operations.toml").write_text('modules = ["ops.py", "odd.py"]')

    last = run("show", operation_id).out.splitlines()[-1]

    assert last == f"  operations call {operation_id}{shown}"


def test_an_unknown_source_is_reported_with_those_that_exist(run: Callable[..., Ran]) -> None:
    ran = run("list", "--source", "nope")

    assert ran.code == 1
    assert "there is no source nope; the config has: local" in ran.err
    assert run("list", "--source", "broker").code == 0


@pytest.mark.parametrize(("columns", "is_folded"), [("80", False), ("60", True)])
def test_a_list_is_readable_on_a_narrow_terminal(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, columns: str, is_folded: bool
) -> None:
    name = "notify_all_subscribers_of_changes"
    (folder / "ops.py").write_text(
        "from operations import operation\n"
        f"@operation('work.{name}', type='query')\n"
        "async def notify() -> None:\n"
        "    'Send a notification to each person who follows the thing that changed.'\n"
    )
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", columns)

    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in run("list").out.splitlines()]

    assert all(len(line) <= int(columns) for line in lines)
    assert any(line.startswith(f"work.{name}  query") for line in lines)
    assert "Send a notification" in lines[-1]
    assert lines[-1].startswith("  Send") == is_folded
