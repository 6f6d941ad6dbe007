"""mypy and pyright check the arguments of typed calls."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.conftest import PROJECT
from tests.limits import scaled

MODULE = """
from typing_extensions import assert_type

from operations import OperationContext, OperationRegistry, operation

registry = OperationRegistry()


@operation("task.create")
async def create(title: str, priority: int = 1) -> str:
    return title


@operation("task.plain")
def plain(title: str) -> float:
    return 1.0


@operation("task.last")
async def last(title: str, context: OperationContext) -> int:
    return 1


@operation("task.first")
async def first(context: OperationContext, title: str) -> bytes:
    return b""


async def main(context: OperationContext) -> None:
    assert_type(await registry.call(create, "x"), str)
    assert_type(await registry.call(create, title="x", priority=3), str)
    assert_type(await registry.call(plain, "x"), float)
    assert_type(await registry.call(last, "x"), int)
    assert_type(await registry.call(last, "x", context=context), int)
    assert_type(await registry.call(first, "x"), bytes)
    assert_type(await context.call(create, "x"), str)
    assert_type(await context.call(last, "x"), int)
    assert_type(await context.call(last, title="x", context=context), int)
    assert_type(await registry.call_as(context, create, "x", priority=2), str)
    assert_type(await registry.call_as(context, first, title="x"), bytes)
    await registry.call(create, 5)  # wrong
    await registry.call(create, titel="x")  # wrong
    await registry.call(plain)  # wrong
    await registry.call(last, 5)  # wrong
    await registry.call(first, 5)  # wrong
    await context.call(create, "x", "high")  # wrong
    await context.call(last, 5)  # wrong
    await registry.call_as(context, create, 5)  # wrong
"""
WRONG = {number for number, line in enumerate(MODULE.splitlines(), 1) if "# wrong" in line}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "line"),
    [
        (["mypy", "--strict", "--cache-dir"], r"typed\.py:(\d+): error"),
        (["pyright", "--pythonpath", sys.executable, "--project"], r"typed\.py:(\d+):\d+ - error"),
    ],
    ids=["mypy", "pyright"],
)
def test_wrong_arguments_are_errors_of_the_type_checker(
    tmp_path: Path, command: list[str], line: str
) -> None:
    (tmp_path / "typed.py").write_text(MODULE)
    settings = '{"typeCheckingMode": "strict", "extraPaths": ["SRC"], "include": ["typed.py"]}'
    (tmp_path / "pyrightconfig.json").write_text(settings.replace("SRC", str(PROJECT / "src")))
    where = str(PROJECT / ".mypy_cache") if command[0] == "mypy" else str(tmp_path)
    file = [str(tmp_path / "typed.py")] if command[0] == "mypy" else []

    ran = subprocess.run(
        [sys.executable, "-m", *command, where, *file], cwd=PROJECT,
        capture_output=True, text=True, timeout=scaled(200), check=False,
    )  # fmt: skip

    assert {int(each) for each in re.findall(line, ran.stdout)} == WRONG, ran.stdout + ran.stderr
