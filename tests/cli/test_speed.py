"""The command line responds quickly, with many operations too."""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cli.conftest import Ran

from operations.cli.lookup import _show
from operations.cli.options import Screen
from operations.config import load_config
from operations.hub import open_hub

Run = Callable[..., Ran]


def test_help_imports_no_command(folder: Path, environment: dict[str, str]) -> None:
    code = (
        "import sys; from operations.__main__ import main; main(['--help']); "
        "heavy = {'aiohttp', 'mcp', 'nats', 'redis', 'rich', 'starlette'}; "
        "print(sorted(heavy & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code]
    printed = subprocess.check_output(command, env=environment, text=True, timeout=60)

    assert "Find and call" in printed
    assert printed.splitlines()[-1] == "[]"


@pytest.mark.parametrize("terminal", [False, True])
def test_five_thousand_operations_are_listed_in_a_second(
    folder: Path, run: Run, terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = {
        f"/things/{number}": {
            "get": {"operationId": f"get_{number}", "summary": f"Get the thing {number}.", "responses": {}}
        }
        for number in range(5000)
    }  # fmt: skip
    document = {"openapi": "3.1.0", "info": {"title": "Big", "version": "1"}, "paths": paths}
    (folder / "big.json").write_text(json.dumps(document))
    (folder / "operations.toml").write_text("[openapi.big]\ndocument = 'big.json'\n")

    async def listed() -> float:
        async with open_hub(load_config(folder / "operations.toml")) as hub:
            screen = Screen()
            monkeypatch.setattr(type(screen), "is_terminal", terminal)
            before = time.process_time()
            _show(hub.registry.specs(), hub, screen, ids=False)
            return time.process_time() - before

    assert asyncio.run(listed()) < 1
    ran = run("list", "thing", "4711", "--limit", "1", "--ids")
    assert ran.out == "big.get_4711\n"
    assert len(run("list", "--ids").out.splitlines()) == 5000
