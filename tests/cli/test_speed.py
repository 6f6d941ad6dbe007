"""The command line answers at once, also where there is much to answer."""

import asyncio
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cli.conftest import Ran

from operations.cli.list_ import _show
from operations.cli.render import Screen
from operations.config import load_config
from operations.hub.hub import open_hub

Run = Callable[..., Ran]


def test_help_answers_in_less_than_three_tenths_of_a_second(
    folder: Path, environment: dict[str, str]
) -> None:
    """In time of its own: what other processes of this machine take is not counted."""

    def seconds() -> float:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run(
            [sys.executable, "-c", "import sys, operations_cli; sys.exit(operations_cli.main(['--help']))"],
            env=environment, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert done.returncode == 0
        assert "Find and call" in done.stdout
        return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime

    assert min(seconds() for _ in range(5)) < 0.3


def test_help_loads_nothing_of_the_package(folder: Path, environment: dict[str, str]) -> None:
    code = (
        "import sys, operations_cli; operations_cli.main(['--help']); "
        "others = {'operations', 'mcp', 'aiohttp', 'asyncio', 'cyclopts', 'rich'}; "
        "print([name for name in sys.modules if name.split('.')[0] in others])"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout

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
