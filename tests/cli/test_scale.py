"""A command imports only the modules that it needs, and handles many operations."""

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from tests.cli.conftest import Ran
from tests.limits import scaled

from operations.contract.specs import OperationSpec
from operations.front.search import Ranking

Run = Callable[..., Ran]


def test_help_imports_no_command(folder: Path, environment: dict[str, str]) -> None:
    code = (
        "import sys; from operations.__main__ import main; main(['--help']); "
        "heavy = {'aiohttp', 'mcp', 'nats', 'redis', 'rich', 'starlette'}; "
        "print(sorted(heavy & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code]
    printed = subprocess.check_output(command, env=environment, text=True, timeout=scaled(150))

    assert "Find and call" in printed
    assert printed.splitlines()[-1] == "[]"


def test_a_list_without_words_builds_no_search_index(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[int] = []
    build = Ranking.__init__

    def counted(ranking: Ranking, specs: Sequence[OperationSpec]) -> None:
        built.append(len(specs))
        build(ranking, specs)

    monkeypatch.setattr(Ranking, "__init__", counted)

    assert "work.add" in run("list", "--ids").out
    assert built == []
    assert "work.add" in run("list", "numbers", "--ids").out
    assert built


def test_five_thousand_operations_are_listed_and_found(folder: Path, run: Run) -> None:
    paths = {
        f"/things/{number}": {
            "get": {"operationId": f"get_{number}", "summary": f"Get the thing {number}.", "responses": {}}
        }
        for number in range(5000)
    }  # fmt: skip
    document = {"openapi": "3.1.0", "info": {"title": "Big", "version": "1"}, "paths": paths}
    (folder / "big.json").write_text(json.dumps(document))
    (folder / "operations.toml").write_text("[openapi.big]\ndocument = 'big.json'\n")

    assert len(run("list", "--ids").out.splitlines()) == 5000
    assert run("list", "thing", "4711", "--limit", "1", "--ids").out == "big.get_4711\n"
