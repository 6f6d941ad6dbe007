"""The documentation is true: every Python block runs, and prints what the block after it says."""

import ast
import asyncio
import contextlib
import inspect
import io
import re
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import PROJECT

PAGES = [PROJECT / "README.md", *sorted((PROJECT / "docs").rglob("*.md"))]
BLOCK = re.compile(
    r"^```python\n(.*?)^```\n(?:\n```output\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL
)
CODE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\((?!https?:)([^)#\s]+)")


def run(code: str, namespace: dict[str, Any]) -> str:
    """What `code` prints; it may use `await` at its top level."""
    compiled = compile(code, "<snippet>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        result = eval(compiled, namespace)  # noqa: S307 - the project's own pages
        if inspect.iscoroutine(result):
            asyncio.run(result)
    return printed.getvalue()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(PROJECT)))
def test_every_snippet_of_a_page_runs_and_prints_what_it_says(page: Path) -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}

    for code, expected in BLOCK.findall(page.read_text(encoding="utf-8")):
        assert run(code, namespace) == expected


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(PROJECT)))
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    for target in LINK.findall(CODE.sub("", page.read_text(encoding="utf-8"))):
        assert (page.parent / target).exists(), target
