"""The documentation is true: every Python block runs, and prints the block after it.

`py` blocks need a broker or a public API; each has a test here that provides it. Commands
in `sh` blocks run in a folder with the files that they name. The tutorial has its own test: test_tutorial.py.
"""

import ast
import asyncio
import contextlib
import importlib
import inspect
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest
from aiohttp import web
from tests.conftest import PROJECT
from tests.docs_code import BLOCK, PAGES
from tests.limits import scaled
from tests.openapi.serving import serving
from tests.servers import RedisServer
from tests.servers import running as running_broker
from tests.support import script

from operations.__main__ import main
from operations.config import parse_config

NEEDS = {"fastapi": "fastapi"}
"""Other packages that the code of a page needs."""

CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\((?!https?:)([^)#\s]+)")


def start(code: str, namespace: dict[str, Any]) -> Coroutine[Any, Any, None] | None:
    """Run `code`; return an awaitable if it uses `await` at its top level."""
    compiled = compile(code, "<snippet>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    result = eval(compiled, namespace)  # noqa: S307 - the project's own pages
    return result if inspect.iscoroutine(result) else None


def run(code: str, namespace: dict[str, Any]) -> str:
    """Return the output of `code`."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        rest = start(code, namespace)
        if rest is not None:
            asyncio.run(rest)
    return printed.getvalue()


def blocks(page: str, language: str) -> list[str]:
    """The blocks of a page in one language."""
    text = (PROJECT / "docs" / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(PROJECT)))
def test_every_snippet_of_a_page_runs_and_prints_its_output(page: Path) -> None:
    if page.stem in NEEDS:
        pytest.importorskip(NEEDS[page.stem])
    namespace: dict[str, Any] = {"__name__": "__main__"}

    for code, expected in BLOCK.findall(page.read_text(encoding="utf-8")):
        assert run(code, namespace) == expected


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(PROJECT)))
def test_every_link_of_a_page_is_valid(page: Path) -> None:
    for target in LINK.findall(CODE.sub("", page.read_text(encoding="utf-8"))):
        assert (page.parent / target).exists(), target


def test_the_readme_works_outside_the_repository_and_begins_with_commands() -> None:
    text = (PROJECT / "README.md").read_text(encoding="utf-8")
    pictures = re.findall(r"!\[[^\]]+\]\((docs/pictures/[\w.]+)\)", text)

    assert sorted(LINK.findall(text)) == sorted(pictures), "only pictures are relative"
    assert sum((PROJECT / each).stat().st_size for each in pictures) < 200_000
    lines = text.splitlines()
    for line in ("pip install 'alkdev-operations[all]'", "operations dev app.py"):
        assert line in lines[:30]
    for line in ("make demo", "make test"):
        assert line in lines[:85]
    modules = re.findall(r"^\| (`operations[^|]*`) \|", text, re.MULTILINE)
    for module in re.findall(r"`([\w.]+)`", " ".join(modules)):
        importlib.import_module(module)
    assert len(modules) == 6


def test_every_measured_number_is_that_of_the_file() -> None:
    numbers = script("doc_numbers")
    data: dict[str, Any] = {
        "tables": {
            "core: add": {
                "command": "scripts/bench core",
                "date": "2026-11-16",
                "machine": "2 cores",
                "rows": {"bare": {"us": 0.5}, "ours": {"us": 2.0, "MB": 1234}},
            }
        },
        "names": {"call": ["core: add", "ours", "us", ".1f", "bare"]},
    }
    used = set[str]()
    page = "takes <!--number:call-->3.4<!----> times\n<!--table:core: add--><!---->\n"

    filled = numbers.fill(page, data, used)

    assert "takes <!--number:call-->4.0<!----> times" in filled
    assert (
        "| add | us | MB |\n|---|--:|--:|\n| bare | 0.50 |  |\n| ours | 2.00 | 1,234 |\n" in filled
    )
    assert "*`scripts/bench core`, 2026-11-16, 2 cores*" in filled
    assert used == {"call", "core: add"}
    assert numbers.main(check=True) == []


def test_the_contents_list_every_page_once() -> None:
    text = (PROJECT / "docs" / "contents.md").read_text(encoding="utf-8")
    listed = LINK.findall(text)
    pages = {
        str(page.relative_to(PROJECT / "docs"))
        for page in (PROJECT / "docs").rglob("*.md")
        if not page.name.startswith("0") and page.name != "contents.md"
    }

    assert sorted(listed) == sorted(pages)


async def test_the_worker_and_the_caller_on_a_broker_find_each_other(
    capsys: pytest.CaptureFixture[str],
) -> None:
    define = blocks("calls.md", "python")[0].partition("target = ")[0]
    with running_broker(RedisServer()) as broker:
        worker, caller = (
            code.replace("redis://127.0.0.1", broker.url) for code in blocks("calls.md", "py")[:2]
        )
        namespace: dict[str, Any] = {}
        start(define, namespace)
        working, calling = start(worker, namespace), start(caller, {})
        assert working is not None
        assert calling is not None
        task = asyncio.create_task(working)
        try:
            while not task.done() and "worker" not in namespace:
                await asyncio.sleep(0.01)
            await calling
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    assert capsys.readouterr().out == "3\n"


async def test_a_public_document_is_imported_and_called(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = blocks("openapi.md", "py")
    (address,) = re.findall(r'"(https://raw[^"]+)"', code)
    document = {
        "openapi": "3.0.3",
        "info": {"title": "GitHub", "version": "1"},
        "servers": [{"url": "https://api.github.com"}],
        "paths": {
            "/repos/{owner}/{repo}": {
                "get": {
                    "operationId": "repos/get",
                    "parameters": [
                        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
                        for name in ("owner", "repo")
                    ],
                    "responses": {"200": {"description": "It."}},
                }
            }
        },
    }

    async def answer(request: web.Request) -> web.Response:
        if request.path == "/openapi.json":
            return web.json_response(document)
        return web.json_response({"description": request.path.removeprefix("/repos/")})

    async with serving(answer) as url:
        local = code.replace(address, f"{url}/openapi.json").replace("https://api.github.com", url)
        rest = start(local, {})
        assert rest is not None
        await rest

    assert capsys.readouterr().out == "python/cpython 200\n"


def test_the_printed_config_is_valid(tmp_path: Path) -> None:
    text, advanced = blocks("config.md", "toml")
    (tmp_path / "ops").mkdir()

    config = parse_config(text, tmp_path / "operations.toml")
    rare = parse_config(advanced, tmp_path / "operations.toml")

    assert config.serve.options["port"] == 8000
    assert rare.limits.options["depth"] == 32


SHOP = """
from operations import operation


@operation("shop.order")
async def order(item: int) -> dict[str, int]:
    \"\"\"Order something.\"\"\"
    return {"item": item}
"""


_STAYING = (["serve"], ["dev", "app.py"], ["serve", "app.py"])
"""Commands that run until they are interrupted; other tests run them."""


def test_every_command_of_the_command_lines_page_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [line for block in blocks("cli.md", "sh") for line in block.splitlines()]
    (tmp_path / "order.json").write_bytes(msgspec.json.encode({"item": 2}))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr(sys, "path", [*sys.path])

    for line in filter(None, lines):
        program, *arguments = shlex.split(line, comments=True)
        if program != "operations":
            subprocess.run(
                ["bash", "-o", "pipefail", "-c", line],
                check=True,
                capture_output=True,
                timeout=scaled(150),
            )
        elif arguments not in _STAYING:
            # In this process, which has imported everything.
            assert main(arguments) == 0, line
        config = tmp_path / "operations.toml"
        if config.exists() and "shop.py" not in config.read_text(encoding="utf-8"):
            (tmp_path / "shop.py").write_text(SHOP, encoding="utf-8")
            config.write_text('modules = ["hello.py", "shop.py"]\n', encoding="utf-8")

    assert "class Client" in (tmp_path / "shop_client.py").read_text(encoding="utf-8")


def test_the_index_lists_every_decision_once_in_order() -> None:
    folder = PROJECT / "docs/decisions"
    index = (folder / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \[(\d+)\]\((.+?)\) \| (.+) \|$", index, re.MULTILINE)

    headings = [
        (page, page.read_text(encoding="utf-8").splitlines()[0])
        for page in sorted(folder.glob("0*.md"))
    ]
    expected = [
        (page.name[:4], page.name, heading.removeprefix(f"# {page.name[:4]}: "))
        for page, heading in headings
    ]
    assert rows == expected


def test_every_decision_has_a_status() -> None:
    known = re.compile(
        r"^Status: (accepted|superseded by \[(\d{4})\]\((\2-[\w-]+\.md)\))[.;]", re.MULTILINE
    )
    for page in (PROJECT / "docs" / "decisions").glob("0*.md"):
        found = known.search(page.read_text(encoding="utf-8"))
        assert found is not None, page.name
        assert found[3] is None or page.with_name(found[3]).exists()
