"""A hub that develops: saved modules are imported again, and an error keeps the previous version."""

import asyncio
import gc
import os
import sys
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.mcp_import.support import eventually

from operations import CallError, OperationContext
from operations.base.json.values import object_of
from operations.config import load_config
from operations.hub import Hub, open_hub
from operations.hub.reloading import following, reload

SAVES = int(os.environ.get("OPERATIONS_SAVES", "60"))
"""`scripts/soak saves` saves 200 times."""

OPERATOR = OperationContext(trusted=True)

VERSION = '''
import asyncio
from dataclasses import dataclass
from enum import Enum

from helper import STEP
from operations import operation

NUMBER = {number}
WAITING = asyncio.Event()


class Size(Enum):
    SMALL = "small"


@dataclass
class Task:
    title: str
    size: Size = Size.SMALL
    version: int = NUMBER


@operation("task.create")
def create(title: str) -> Task:
    """Create a task, version {number}."""
    return Task(title)


@operation("task.step", type="query")
async def step() -> int:
    return NUMBER + STEP


@operation("task.wait")
async def wait() -> int:
    await WAITING.wait()
    return NUMBER
'''


@pytest.fixture(autouse=True)
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Modules of the folder are forgotten, and the waits for complete files are short."""
    monkeypatch.setattr("operations.hub.reloading._CODE_SETTLE_SECONDS", 0)
    monkeypatch.setattr("operations.hub.reloading._CODE_POLL_SECONDS", 0.01)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    path = list(sys.path)
    yield
    sys.path[:] = path
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


@asynccontextmanager
async def developing(folder: Path) -> AsyncGenerator[Hub]:
    save(folder, 0)
    (folder / "helper.py").write_text("STEP = 1\n")
    async with open_hub(load_config(folder / "app.py"), develops=True) as hub:
        yield hub


def save(folder: Path, number: int) -> None:
    (folder / "app.py").write_text(VERSION.replace("{number}", str(number)))


async def call(hub: Hub, name: str, input: Any = None) -> Any:
    return (await hub.registry.execute(f"task.{name}", input, OPERATOR)).data


def versions(folder: Path) -> list[dict[str, Any]]:
    """Return the globals of each version of the file that is still in memory."""
    gc.collect()
    objects: list[Any] = gc.get_objects()
    file = str(folder / "app.py")
    return [
        each
        for each in (object_of(some) for some in objects if type(some) is dict)
        if each.get("__file__") == file and "NUMBER" in each
    ]


async def test_saves_under_load_lose_no_call_and_leak_nothing(tmp_path: Path) -> None:
    saves, seen, failed = SAVES, set[int](), list[BaseException]()
    async with developing(tmp_path) as hub:
        first = asyncio.create_task(call(hub, "wait"))
        await asyncio.sleep(0)
        is_over = asyncio.Event()

        async def load() -> None:
            while not is_over.is_set():
                try:
                    seen.add((await call(hub, "create", {"title": "x"}))["version"])
                    seen.add(await call(hub, "step") - 1)
                except CallError as error:
                    failed.append(error)
                await asyncio.sleep(0)

        callers = [asyncio.create_task(load()) for _ in range(4)]
        waiting: list[tuple[int, asyncio.Task[Any]]] = []
        known, tasks = 0, 0
        for number in range(1, saves + 1):
            save(tmp_path, number)
            await reload(hub)
            if number % 20 == 0:
                waiting.append((number, asyncio.create_task(call(hub, "wait"))))
                await asyncio.sleep(0)
            assert (await call(hub, "step")) == number + 1
            if number == 20:
                known, tasks = len(sys.modules), len(asyncio.all_tasks())
        is_over.set()
        await asyncio.gather(*callers)
        running = [task for _, task in waiting]
        assert failed == []
        assert {0, saves} <= seen
        assert not first.done()
        assert not any(each.done() for each in running)
        assert len(sys.modules) == known
        assert len(asyncio.all_tasks()) <= tasks + len(running)

        for version in versions(tmp_path):
            version["WAITING"].set()
        assert await first == 0
        assert [await task for task in running] == [number for number, _ in waiting]
        del running, waiting, first, callers
        # The current version, the one before, and those that caches of a fixed size keep.
        assert len(versions(tmp_path)) <= 4


@pytest.mark.parametrize("file", ["app.py", "helper.py"])
async def test_a_version_with_an_error_does_not_replace_the_previous_one(
    tmp_path: Path, file: str
) -> None:
    async with developing(tmp_path) as hub:
        good = (tmp_path / file).read_text()
        (tmp_path / file).write_text("def broken(:\n")
        await reload(hub)

        assert hub.code is not None
        assert hub.code.problem is not None
        assert file in hub.code.problem
        assert "SyntaxError" in hub.code.problem
        assert "importlib" not in hub.code.problem
        assert not hub.code.has_changed, "it would be imported again and again"
        assert await call(hub, "step") == 1
        assert await call(hub, "create", {"title": "x"})

        (tmp_path / file).write_text(good + "\n")
        assert hub.code.has_changed
        await reload(hub)
        assert hub.code.problem is None


async def test_a_helper_that_changes_is_imported_again(tmp_path: Path) -> None:
    async with developing(tmp_path) as hub, following(hub):
        (tmp_path / "helper.py").write_text("STEP = 5\n")
        outcome = asyncio.Event()
        hub.on_outcome = outcome.set
        await asyncio.wait_for(outcome.wait(), 60)
        assert await call(hub, "step") == 5


async def test_a_script_beside_the_file_is_not_its_code(tmp_path: Path) -> None:
    async with developing(tmp_path) as hub:
        assert hub.code is not None
        (tmp_path / "script.py").write_text("import operations\n")
        assert not hub.code.has_changed, "global variables would begin anew"

        # Only now it is imported.
        good = (tmp_path / "app.py").read_text()
        (tmp_path / "app.py").write_text("import script\n" + good)
        await reload(hub)
        (tmp_path / "script.py").write_text("NUMBER = 1\n")
        assert hub.code.has_changed

        (tmp_path / "app.py").write_text(good)
        await reload(hub)
        (tmp_path / "script.py").write_text("NUMBER = 12\n")
        assert not hub.code.has_changed


async def test_a_missing_module_is_found_when_it_is_saved(tmp_path: Path) -> None:
    async with developing(tmp_path) as hub:
        assert hub.code is not None
        (tmp_path / "app.py").write_text("import later\n" + (tmp_path / "app.py").read_text())
        await reload(hub)
        assert "later" in str(hub.code.problem)
        (tmp_path / "later.py").write_text("")
        assert hub.code.has_changed
        await reload(hub)
        assert hub.code.problem is None


async def test_a_file_that_cannot_be_imported_at_first_is_served_when_it_can(
    tmp_path: Path,
) -> None:
    (tmp_path / "app.py").write_text("import missing_helper\n")
    async with open_hub(load_config(tmp_path / "app.py"), develops=True) as hub:
        assert "missing_helper" in str(hub.problem)
        (tmp_path / "missing_helper.py").write_text("")
        (tmp_path / "helper.py").write_text("STEP = 1\n")
        save(tmp_path, 7)
        await reload(hub)
        assert await call(hub, "step") == 8


async def test_operations_that_are_removed_and_added_follow_the_file(tmp_path: Path) -> None:
    async with developing(tmp_path) as hub:
        text = (tmp_path / "app.py").read_text()
        (tmp_path / "app.py").write_text(text.replace("task.step", "task.next"))
        await reload(hub)
        assert await call(hub, "next") == 1
        assert "task.step" not in hub.registry


async def test_a_config_beside_the_file_is_used_and_followed(tmp_path: Path) -> None:
    async with developing(tmp_path) as hub, following(hub):
        (tmp_path / "operations.toml").write_text("[limits]\ntimeout = 7\n")
        await eventually(lambda: hub.file.config.limits.timeout == 7)
        (tmp_path / "more.py").write_text(
            'from operations import operation\n\n\n@operation("more.one")\ndef one() -> int:\n    return 1\n'
        )
        (tmp_path / "operations.toml").write_text('modules = ["more.py"]\n')
        await eventually(lambda: "more.one" in hub.registry)
        assert await call(hub, "step") == 1
        (tmp_path / "operations.toml").unlink()
        await eventually(lambda: "more.one" not in hub.registry)
        assert await call(hub, "step") == 1


async def test_a_config_with_an_error_is_the_problem_until_it_is_fixed(tmp_path: Path) -> None:
    async with developing(tmp_path) as hub, following(hub):
        (tmp_path / "operations.toml").write_text("[limits]\ntimeot = 7\n")
        await eventually(lambda: hub.problem is not None)
        assert "operations.toml:2" in str(hub.problem)
        save(tmp_path, 3)
        (tmp_path / "operations.toml").write_text("[limits]\ntimeout = 7\n")
        await eventually(lambda: hub.problem is None)
        await eventually(lambda: hub.file.config.limits.timeout == 7)
        assert await call(hub, "step") == 4


REGISTRY = """
from operations import OperationRegistry

registry = OperationRegistry()
calls = []


@registry.operation("math.double", type="query")
def double(number: int) -> int:
    return 2 * number


@registry.operation("math.calls", type="query")
def all_calls() -> list[str]:
    return calls
"""

MIDDLEWARE = """

@registry.use
async def note(call, next):
    calls.append(call.spec.id)
    return await next(call)
"""


@pytest.mark.parametrize("more", ["", MIDDLEWARE])
async def test_a_registry_in_the_file_is_served_with_its_middleware(
    tmp_path: Path, more: str
) -> None:
    (tmp_path / "app.py").write_text(REGISTRY + more)
    async with open_hub(load_config(tmp_path / "app.py")) as hub:
        double = await hub.registry.execute("math.double", {"number": 4}, OPERATOR)
        calls = await hub.registry.execute("math.calls", None, OPERATOR)
        assert [each.problem for each in hub.sources] == [None]
        assert [each.skipped for each in hub.sources] == [()]
    assert double.data == 8
    assert calls.data == (["math.double", "math.calls"] if more else [])


async def test_run_is_refused_while_the_file_is_imported(tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(REGISTRY + "\nimport operations\n\noperations.run(registry)\n")
    async with open_hub(load_config(tmp_path / "app.py"), develops=True) as hub:
        assert "__main__" in str(hub.problem)
