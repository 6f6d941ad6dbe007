"""Every command ends with a message, as text or JSON, and an exit code."""

import subprocess
import sys
from collections.abc import Callable
from itertools import chain, pairwise
from pathlib import Path

import pytest
from tests.cli.conftest import Ran

from operations import MissingExtraError, cli
from operations.__main__ import main
from operations.cli.options import Common, command

Run = Callable[..., Ran]


async def test_a_defect_is_reported_without_a_traceback(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    @command
    async def broken(*, common: Common) -> None:
        raise KeyError("unexpected")

    assert await broken(common=Common()) == 1
    printed = capsys.readouterr().err
    assert "this is a defect: KeyError" in printed
    assert "Traceback" not in printed

    assert await broken(common=Common(verbose=True)) == 1
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


def test_help_shows_no_default_of_a_switch(run: Run) -> None:
    shown = run("call", "--help").out

    assert "--envelope" in shown
    assert "default: False" not in shown
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
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=150, check=False
    )

    assert (done.returncode, done.stderr) == (130, "")


def test_a_missing_cli_extra_is_reported() -> None:
    code = "import sys; sys.modules['cyclopts'] = None; from operations.__main__ import main; main(['list'])"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=150, check=False
    )

    assert done.returncode == 1
    assert "pip install 'alkdev-operations[cli]'" in done.stderr
