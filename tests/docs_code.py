"""Write the code of every docs page as a module for the type checkers: `python -m tests.docs_code FOLDER`."""

import ast
import re
import sys
from pathlib import Path
from textwrap import indent
from typing import cast

PROJECT = Path(__file__).resolve().parent.parent
PAGES = [
    PROJECT / "README.md",
    PROJECT / "CONTRIBUTING.md",
    *sorted((PROJECT / "docs").rglob("*.md")),
]
BLOCK = re.compile(
    r"^```python\n(.*?)^```\n(?:\n```output\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL
)
"""A block of code, and what it prints."""

RELAXED = """\
# pyright: strict, reportRedeclaration=false, reportUnusedFunction=false, reportUnusedClass=false
# pyright: reportUnusedImport=false, reportUnusedVariable=false
# mypy: disable-error-code=no-redef
"""
"""A page may define a name twice, and need not use what it defines."""


def typed_module(code: str) -> str:
    """Return a module in which the snippets of a page are the body of a coroutine, below their imports."""
    lines = code.splitlines()
    tree = cast(
        "ast.Module",
        compile(code, "<page>", "exec", flags=ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT),
    )
    spans = [
        range(node.lineno - 1, cast("int", node.end_lineno))
        for node in tree.body
        if isinstance(node, (ast.Import, ast.ImportFrom))
    ]
    imported = {number for span in spans for number in span}
    # Snippets that stand alone repeat imports.
    imports = "\n".join(
        dict.fromkeys("\n".join(lines[number] for number in span) for span in spans)
    )
    body = "\n".join(line for number, line in enumerate(lines) if number not in imported)
    return f"{RELAXED}{imports}\n\n\nasync def main() -> None:\n{indent(body, '    ')}\n"


def write_modules(folder: Path) -> None:
    """Write one module per page that has code."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.py"):
        old.unlink()
    for page in PAGES:
        code = "\n".join(code for code, _ in BLOCK.findall(page.read_text(encoding="utf-8")))
        if code:
            name = f"page_{page.stem.replace('-', '_')}.py"
            (folder / name).write_text(typed_module(code), encoding="utf-8")


if __name__ == "__main__":
    write_modules(Path(sys.argv[1]))
