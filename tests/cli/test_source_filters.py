"""A command opens only the sources that it needs; other servers are not started."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cli.conftest import CONFIG, OPERATIONS, Ran
from tests.mcp_import.support import RAW

NESTING = """

@operation("work.ask_files")
async def ask_files(context: OperationContext) -> object:
    return (await context.env.files.answer({"result": {"structuredContent": {"n": 1}}})).data


@operation("work.ask_nobody")
async def ask_nobody(context: OperationContext) -> object:
    return (await context.env.nobody.home({})).data
"""


@pytest.fixture
def started(folder: Path) -> Callable[[], set[str]]:
    """Two servers in the config, two in an `mcp.json`; those that were started."""
    (folder / "ops.py").write_text(OPERATIONS + NESTING)

    def entry(name: str) -> dict[str, object]:
        # In this mode it leaves a file when it starts.
        arguments = ["-I", "-S", RAW, "silent_later", str(folder / f"{name}.started")]
        return {"command": sys.executable, "args": arguments}

    tables = [
        f"[mcp.{name}]\ncommand = {json.dumps(sys.executable)}\nargs = {json.dumps(entry(name)['args'])}\n"
        for name in ("files", "other")
    ]
    (folder / "operations.toml").write_text(
        'mcp_json = ["mcp.json"]\n' + CONFIG + "\n".join(tables)
    )
    (folder / "mcp.json").write_text(
        json.dumps({"mcpServers": {"listed": entry("listed"), "more": entry("more")}})
    )

    def started() -> set[str]:
        found = {path.stem for path in folder.glob("*.started")}
        for path in folder.glob("*.started"):
            path.unlink()
        return found

    return started


@pytest.mark.parametrize(
    ("command", "servers"),
    [
        (["call", "work.add", "a=1"], set()),
        (["show", "work.add"], set()),
        (["call", "files.pid"], {"files"}),
        (["show", "other.pid"], {"other"}),
        (["call", "listed.pid"], {"listed"}),
        (["list"], {"files", "other", "listed", "more"}),
        (["list", "--namespace", "work"], set()),
        (["list", "--namespace", "more"], {"more"}),
        (["list", "--source", "local"], set()),
        (["list", "--source", "mcp:files"], {"files"}),
        (["list", "--source", "mcp.json"], {"listed", "more"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_only_needed_sources_are_started(
    run: Callable[..., Ran],
    started: Callable[[], set[str]],
    command: list[str],
    servers: set[str],
) -> None:
    ran = run(*command)

    assert ran.code == 0, ran.err
    assert ran.out
    assert started() == servers


def test_a_source_is_started_by_a_nested_call(
    run: Callable[..., Ran], started: Callable[[], set[str]]
) -> None:
    ran = run("call", "work.ask_files")

    assert ran.json == {"n": 1}, ran.err
    assert started() == {"files"}
    roots = run("trace", "--json").json
    assert [each["operationId"] for each in roots[-1]["calls"]] == ["files.answer"]


def test_a_nested_call_of_an_unknown_operation_is_an_error_of_the_caller(
    run: Callable[..., Ran], started: Callable[[], set[str]]
) -> None:
    ran = run("call", "work.ask_nobody")

    assert ran.code == 1
    assert "work.ask_nobody made an invalid call: There is no operation 'nobody.home'" in ran.err
    assert started() == set()


def test_a_misspelt_operation_gets_a_suggestion_from_earlier_listings(
    run: Callable[..., Ran], started: Callable[[], set[str]]
) -> None:
    run("list")
    assert started()
    ran = run("call", "fles.pid")

    assert ran.code == 4
    assert 'Did you mean "files.pid"?' in ran.err
    assert started() == set()
