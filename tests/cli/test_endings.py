"""Every command ends with a message, as text or JSON, and an exit code."""

import os
import subprocess
import sys
from collections.abc import Callable
from itertools import chain, pairwise
from pathlib import Path

import pytest
from tests.cli.conftest import Ran
from tests.limits import scaled

from operations import MissingExtraError, cli
from operations.__main__ import main
from operations.cli.options import Common, command

Run = Callable[..., Ran]

STUBBORN = """
import asyncio
from operations import operation

@operation("work.stubborn")
async def stubborn() -> None:
    while True:
        try:
            await asyncio.sleep(1)
        except asyncio.CancelledError:
            pass
"""

CAREFUL = """
import asyncio
import sys
from pathlib import Path
from operations import operation

@operation("work.careful")
async def careful() -> None:
    try:
        print("work.careful", file=sys.stderr, flush=True)
        await asyncio.sleep(60)
    finally:
        Path("closed").touch()
"""


def test_a_defect_is_reported_without_a_traceback(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    @command
    async def broken(*, common: Common) -> None:
        raise KeyError("unexpected")

    assert broken(common=Common()) == 1
    printed = capsys.readouterr().err
    assert "this is a defect: KeyError" in printed
    assert "Traceback" not in printed

    assert broken(common=Common(verbose=True)) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_missing_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(_: str | None) -> None:
        raise MissingExtraError("operations.server", extra="server")

    def missing_in_a_command(_: str | None) -> None:
        try:
            missing(None)
        except ImportError as error:
            raise ImportError("Cannot import module 'operations.cli.serve'") from error

    for build in (missing, missing_in_a_command):
        monkeypatch.setattr(cli, "build_app", build)

        assert main(["serve"]) == 1
        assert "pip install 'alkdev-operations[server]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--config", "x.toml", "list"], 2, "options follow the command"),
        (["serve", "--port", "99999"], 2, "65535"),
        (["work", "--concurrency", "0"], 2, "--concurrency"),
        (["work", "--grace", "-1"], 2, "--grace"),
        (
            ["grant", "create", "ann", "--holder", "bot", "-o", "a.*", "b.*"],
            2,
            "Unexpected argument: b.*. Repeat an option for each of its values",
        ),
        (["list", "--limit", "-1"], 2, "--limit"),
        (["trace", "-n", "0"], 2, "-n"),
        (
            ["call", "work.add", "a=1", "--count", "2"],
            2,
            "--count applies only to subscriptions; work.add is a query",
        ),
        (["work"], 1, "the config has no broker: add [brokers.main]"),
        (["list", "--as", "nobody"], 3, "Known: alice, bob, anonymous."),
        (["login", "nope"], 1, "the config has no [mcp.nope]"),
    ],
)
def test_a_wrong_command_line_is_reported_with_the_next_step(
    run: Run, arguments: list[str], code: int, words: str
) -> None:
    ran = run(*arguments)

    assert (ran.code, ran.out) == (code, "")
    assert words in ran.err
    assert words in run(*arguments, "--json").error["message"]


def test_help_shows_no_obvious_default(run: Run) -> None:
    shown = run("call", "--help").out

    assert "--envelope" in shown
    assert "default: False" not in shown
    assert "default: None" not in shown
    assert "()" not in shown


def test_commands_without_their_extra_are_not_completed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "operations.cli.serve", None)

    assert main(["completion", "bash"]) == 0
    written = capsys.readouterr().out
    assert "doctor" in written
    assert "--entry-point" not in written


def test_every_command_of_the_table_exists_and_has_help(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for name in chain.from_iterable(cli.GROUPS.values()):
        assert main([name, "--help"]) == 0
        printed = capsys.readouterr().out
        assert "--json" in printed
        assert "--config" in printed
        # Lines are as long as the terminal allows.
        for line, following in pairwise(printed.partition("╭")[0].splitlines()):
            first = following.partition(" ")[0]
            assert len(line) <= 80
            assert not line or not first or len(f"{line} {first}") > 80, line


def test_the_help_overview_lists_every_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for tokens in ([], ["--help"], ["-h"]):
        assert main(tokens) == 0
        printed = capsys.readouterr().out
        for group, commands in cli.GROUPS.items():
            assert f"\n{group}\n" in printed
            for name, (_, line) in commands.items():
                assert f"  {name:<12}{line}\n" in printed
        assert "\x1b" not in printed
        assert max(map(len, printed.splitlines())) <= 80


@pytest.mark.parametrize(
    "arguments", [["list"], ["call", "work.add", "a=1"], ["show", "work.add"], ["-h"]]
)
@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_closed_stream_discards_its_output(
    folder: Path, environment: dict[str, str], arguments: list[str], closed: str
) -> None:
    line = f'exec "$@" {closed}'
    done = subprocess.run(
        ["sh", "-c", line, "sh", sys.executable, "-m", "operations", *arguments],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=scaled(150), check=False,
    )  # fmt: skip

    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    assert bool(done.stdout) == (">&-" not in closed.split())


@pytest.mark.parametrize("arguments", [["trace"], ["list"], ["doctor"], ["list", "--help"]])
def test_a_reader_that_leaves_ends_the_command_in_one_way(
    folder: Path, environment: dict[str, str], arguments: list[str]
) -> None:
    command = [sys.executable, "-m", "operations"]
    environment["PYTHONUNBUFFERED"] = "1"
    subprocess.run([*command, "call", "work.add", "a=1"], cwd=folder, env=environment, check=True)
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [*command, *arguments], cwd=folder, env=environment,
        stdout=writer, stderr=subprocess.PIPE, timeout=scaled(150), check=False,
    )  # fmt: skip
    os.close(writer)

    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize("arguments", [[], ["list"], ["list", "--help"]])
def test_a_full_disk_is_reported(
    folder: Path, environment: dict[str, str], arguments: list[str]
) -> None:
    environment.pop("PYTHONUNBUFFERED", None)
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "operations", *arguments], cwd=folder, env=environment,
            stdout=full, stderr=subprocess.PIPE, text=True, timeout=scaled(150), check=False,
        )  # fmt: skip

    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1)
    assert "No space left on device" in done.stderr


def test_a_command_ends_although_a_handler_ignores_its_cancellation(
    folder: Path, environment: dict[str, str]
) -> None:
    (folder / "ops.py").write_text(STUBBORN)
    done = subprocess.run(
        [sys.executable, "-m", "operations", "call", "work.stubborn", "--timeout", "0.1"],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=scaled(100), check=False,
    )  # fmt: skip

    assert done.returncode == 7
    assert done.stderr.startswith("TIMEOUT: work.stubborn")
    assert len(done.stderr.splitlines()) == 1


def test_sigterm_ends_a_call_like_ctrl_c(folder: Path, environment: dict[str, str]) -> None:
    (folder / "ops.py").write_text(CAREFUL)
    command = [sys.executable, "-m", "operations", "call", "work.careful"]
    with subprocess.Popen(command, cwd=folder, env=environment, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        assert b"work.careful" in process.stderr.readline()
        process.terminate()

        assert (process.wait(scaled(100)), process.stderr.read()) == (143, b"")
    assert (folder / "closed").exists()


def test_output_in_a_pipe_is_utf_8_in_any_locale(folder: Path, environment: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "operations", "call", "work.ship", "to.street=☃", "size=small", "notes=x"],
        cwd=folder, env={**environment, "PYTHONIOENCODING": "latin-1"}, capture_output=True,
        timeout=scaled(150), check=False,
    )  # fmt: skip

    assert (done.returncode, done.stderr) == (0, b"")
    assert "☃" in done.stdout.decode()


def test_a_folder_may_have_a_name_that_the_locale_cannot_encode(
    folder: Path, environment: dict[str, str]
) -> None:
    named = folder.rename(folder.with_name("größe"))
    variables = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run(
        [sys.executable, "-m", "operations", "call", "work.add", "a=1"], cwd=named,
        env={**environment, **variables}, capture_output=True, timeout=scaled(150), check=False,
    )  # fmt: skip

    assert (done.returncode, done.stdout, done.stderr) == (0, b"2\n", b"")


def test_a_user_may_have_no_home(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    # As for a user id without an account, which containers may have.
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])

    assert run("trace").code == 0


def test_ctrl_c_while_the_command_is_loaded_shows_no_traceback() -> None:
    code = """
import sys
from collections.abc import Callable
class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == "cyclopts":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupting())
from operations.__main__ import main
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=scaled(150),
        check=False,
    )

    assert (done.returncode, done.stderr) == (130, "")


def test_a_missing_cli_extra_is_reported() -> None:
    code = "import sys; sys.modules['cyclopts'] = None; from operations.__main__ import main; main(['list'])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=scaled(150),
        check=False,
    )

    assert done.returncode == 1
    assert "pip install 'alkdev-operations[cli]'" in done.stderr
