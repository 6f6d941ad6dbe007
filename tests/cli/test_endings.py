"""However a command ends, it says so in words, or in JSON, and with an exit code."""

from pathlib import Path

import pytest

import operations_cli
from operations import MissingExtraError
from operations.cli.options import Common, command


async def test_a_defect_is_told_without_a_traceback(
    capsys: pytest.CaptureFixture[str], folder: Path
) -> None:
    @command
    async def broken(*, common: Common) -> None:
        raise KeyError("nobody thought of this")

    assert await broken(common=Common()) == 1
    told = capsys.readouterr().err
    assert "this is a defect: KeyError" in told
    assert "Traceback" not in told

    assert await broken(common=Common(verbose=True)) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_missing_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(_: str | None) -> None:
        raise MissingExtraError("operations.server", extra="server")

    monkeypatch.setattr(operations_cli, "build_app", missing)

    assert operations_cli.main(["serve"]) == 1
    assert "pip install 'alkdev-operations[server]'" in capsys.readouterr().err


def test_every_command_of_the_table_is_there_and_tells_about_itself(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    for name in operations_cli.COMMANDS:
        assert operations_cli.main([name, "--help"]) == 0
        told = capsys.readouterr().out
        assert "--json" in told
        assert "--config" in told
