"""`operations call --detach`, `operations runs`, and `[runs]` in the file."""

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from operations import OperationContext
from operations.__main__ import main
from operations.config import load_config
from operations.hub import open_hub
from operations.hub.operations import readiness

OPERATIONS = """
from typing import Annotated

from msgspec import Meta

from operations import CallError, OperationContext, operation

@operation("job.add")
async def add(a: int, b: int) -> int:
    return a + b

@operation("job.ask", durable=True)
async def ask(context: OperationContext) -> list[object]:
    await context.progress(1, 2, "half")
    answer = await context.elicit("Go on?", {"type": "object", "properties": {}})
    return [answer["action"], await context.wait_for("go")]

@operation("job.token")
async def token() -> dict[str, Annotated[str, Meta(extra_json_schema={"format": "password"})]]:
    return {"token": "hunter2"}

@operation("job.fail")
async def fail() -> None:
    raise CallError("UNAVAILABLE", "not now")
"""

FILE = """
modules = ["job_operations.py"]
[record.trace]
enabled = false
[access.keys.ada]
key = { env = "ADA" }
[runs]
url = "sqlite:runs.db"
advanced.lease = 1
advanced.grace = 1
[runs.schedules.hourly]
operation = "job.add"
input = {a = 40, b = 2}
every = 3600
as = "ada"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "job_operations.py").write_text(OPERATIONS)
    (tmp_path / "operations.toml").write_text(FILE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ADA", "a key")
    return tmp_path


class CommandLine:
    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *tokens: str) -> tuple[int, str]:
        code = main(tokens)
        out, err = self._capsys.readouterr()
        return code, (out or err).strip()

    def json(self, *tokens: str) -> Any:
        code, out = self(*tokens, "--json")
        assert code == 0, out
        return msgspec.json.decode(out)


@pytest.fixture
def operations(folder: Path, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    return CommandLine(capsys)


def served(folder: Path, run_id: str, *statuses: str) -> None:
    """Work on the runs of a config, as a server does, until a run has one of these statuses."""

    async def work() -> None:
        async with open_hub(folder / "operations.toml", works=True) as hub:
            run = await hub.registry.run(run_id, OperationContext(trusted=True))
            async with asyncio.timeout(20):
                async for state in run.watch():
                    if state.status in statuses:
                        return

    asyncio.run(work())


def test_a_detached_call_is_worked_on_by_a_server(operations: CommandLine, folder: Path) -> None:
    code, run_id = operations("call", "job.ask", "--detach", "--key", "k")
    same = operations.json("call", "job.ask", "--detach", "--key", "k")
    queued = operations.json("runs", "show", run_id)
    served(folder, run_id, "input_required")
    waiting = operations.json("runs", "show", run_id)
    shown = operations("runs", "show", run_id)[1]
    key = waiting["waiting"][0]["key"]
    answers = [operations("runs", "answer", run_id, key, '{"action": "decline"}') for _ in range(2)]
    operations("runs", "signal", run_id, "go", "5")
    served(folder, run_id, "completed")

    assert code == 0
    assert same == {"id": run_id}
    assert queued["status"] == "queued"
    assert (waiting["status"], waiting["message"]) == ("input_required", "half")
    assert "Go on?" in shown
    assert [code for code, _ in answers] == [0, 1]
    assert operations.json("runs", "result", run_id) == ["decline", 5]
    assert operations("runs", "watch", run_id)[0] == 0
    assert "completed" in operations("runs", "watch", run_id)[1]


def test_secrets_are_only_in_the_result(operations: CommandLine, folder: Path) -> None:
    run_id = operations("call", "job.token", "--detach")[1]
    served(folder, run_id, "completed")
    shown = [
        operations("runs", verb, *given, *form)[1]
        for verb, given in (
            ("list", ()),
            ("show", (run_id,)),
            ("watch", (run_id,)),
            ("cancel", (run_id,)),
        )
        for form in ((), ("--json",))
    ]

    assert "hunter2" not in "".join(shown)
    assert "**********" in shown[2]
    assert operations.json("runs", "result", run_id) == {"token": "hunter2"}


def test_the_exit_code_is_that_of_the_call(operations: CommandLine, folder: Path) -> None:
    run_id = operations("call", "job.fail", "--detach")[1]
    served(folder, run_id, "failed")
    codes = [operations("runs", verb, run_id)[0] for verb in ("result", "watch", "show")]
    retried = operations.json("runs", "retry", run_id)
    operations("runs", "cancel", run_id)

    # 8 is unavailable.
    assert codes == [8, 8, 0]
    assert retried["status"] == "queued"
    assert (
        operations.json("runs", "list", "--operation", "job.fail")["runs"][0]["status"]
        == "cancelled"
    )
    assert operations("runs", "show", "0" * 32)[0] == 1
    assert operations("runs", "retry", run_id, "--ran", "{")[0] == 2
    assert operations("call", "job.add", "a=1", "b=2", "--key", "k")[0] == 2


LEDGER = """
[record.ledger]
file = "ledger-{pid}"
key = { env = "LEDGER" }
"""


def test_what_changes_a_run_is_in_the_ledger(
    operations: CommandLine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEDGER", "k" * 32)
    (folder / "operations.toml").write_text(FILE + LEDGER)
    run_id = operations("call", "job.ask", "--detach")[1]
    served(folder, run_id, "input_required")
    key = operations.json("runs", "show", run_id)["waiting"][0]["key"]
    operations("runs", "answer", run_id, key, '{"action": "decline"}')
    operations("runs", "signal", run_id, "go", "5")
    served(folder, run_id, "completed")
    other = operations("call", "job.add", "a=1", "b=2", "--detach")[1]
    operations("runs", "cancel", other)
    operations("runs", "retry", other)

    (file,) = folder.glob("ledger-*")
    lines = [msgspec.json.decode(line) for line in file.read_bytes().splitlines()]
    told = [
        (line["event"], line.get("key") or line.get("status"), line.get("by"))
        for line in lines
        if line.get("run") == run_id and line["event"] in ("run.answered", "run.ended")
    ]
    mine = [line["event"] for line in lines if line.get("run") == other]

    assert told == [
        ("run.answered", key, "operator"),
        ("run.answered", "signal:go", "operator"),
        ("run.ended", "completed", None),
    ]
    assert mine == ["run.started", "run.cancelled", "run.ended", "run.retried"]
    assert operations("ledger", "verify")[0] == 0


def test_a_schedule_starts_one_run_for_each_slot(operations: CommandLine, folder: Path) -> None:
    """In processes one after the other; as the caller that it names, and after it was seen for the first time."""
    for _ in range(3):
        run_id = operations("call", "job.add", "a=1", "b=1", "--detach")[1]
        served(folder, run_id, "completed")
        with closing(sqlite3.connect(folder / "runs.db")) as file, file:
            file.execute("UPDATE meta SET value = '0' WHERE name LIKE 'schedule:%'")

    runs = operations.json("runs", "list", "--operation", "job.add")["runs"]
    mine = [each for each in runs if each.get("owner") == "ada"]

    assert len(mine) == 1
    assert operations.json("runs", "result", mine[0]["id"]) == 42


def test_a_config_without_runs_says_so(operations: CommandLine, folder: Path) -> None:
    (folder / "operations.toml").write_text('modules = ["job_operations.py"]')

    code, message = operations("runs", "list")

    assert code == 3
    assert "[runs]" in message
    assert operations("call", "job.add", "a=1", "b=1", "--detach")[0] == 8


@pytest.mark.parametrize(
    "table",
    [
        'url = "mysql:x"',
        'url = "sqlite:runs.db"\n[runs.schedules.x]\noperation = "job.add"',
        'url = "sqlite:runs.db"\n[runs.schedules.x]\noperation = "job.add"\ncron = "99 * * * *"',
        'url = "sqlite:runs.db"\n[runs.schedules.x]\noperation = "job.add"\nevery = 5\nas = "x"',
    ],
)
def test_a_wrong_table_is_reported(operations: CommandLine, folder: Path, table: str) -> None:
    (folder / "operations.toml").write_text(f"[runs]\n{table}\n")

    code, message = operations("runs", "list")

    assert code == 3
    assert "runs." in message


def test_the_key_of_the_state_also_encrypts_runs(
    operations: CommandLine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = FILE.replace(
        "[runs]", '[state]\nkey = { env = "STATE" }\nurl = "sqlite:state.db"\n[runs]'
    )
    (folder / "operations.toml").write_text(text)
    monkeypatch.setenv("STATE", "a key of at least thirty-two bytes")

    code, run_id = operations("call", "job.add", "a=987654321", "b=2", "--detach")
    assert code == 0, run_id
    assert operations.json("runs", "show", run_id)["id"] == run_id
    stored = b"".join(path.read_bytes() for path in folder.glob("runs.db*"))
    assert run_id.encode() in stored
    assert b"987654321" not in stored

    monkeypatch.setenv("STATE", "another key of at least thirty-two bytes")
    code, message = operations("approvals", "list")
    assert code != 0
    assert "another key" in message
    monkeypatch.delenv("STATE")
    assert "STATE" in operations("runs", "list")[1]


def test_a_hub_whose_journal_cannot_be_written_is_degraded(folder: Path) -> None:
    async def check() -> Any:
        async with open_hub(load_config(folder / "operations.toml"), works=True) as hub:
            before = await readiness(hub)
            store: Any = hub.registry.run_store
            await store.write(lambda db: db.count("ALTER TABLE meta RENAME TO other"))
            return before, await readiness(hub)

    before, after = asyncio.run(check())

    assert before is True
    assert after["disconnected"] == ["runs"]
