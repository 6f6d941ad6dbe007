"""Print the fixed limits that users can observe, from the constants of the code.

    .venv/bin/python scripts/fixed_limits.py            write the tables into docs/fixed-limits.md
    .venv/bin/python scripts/fixed_limits.py --check    exit with 1 if the page differs

A constant stays beside the rule that it belongs to; `LIMITS` says which of them are promises. The text of a row is the
first sentence of the string below the constant.
"""

import ast
import importlib
import inspect
import re
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parent.parent / "docs" / "fixed-limits.md"

LIMITS: dict[str, tuple[str, ...]] = {
    "base": (
        "base.json.values:MAX_DEPTH",
        "base.json.values:MAX_REQUEST_VALUES",
        "base.json.values:MAX_DOCUMENT_VALUES",
        "base.json.values:MAX_DOCUMENT_DEPTH",
        "base.json.values:MAX_NAME",
        "base.deadline:RESOLUTION",
    ),
    "schema": (
        "schema.compiling:MAX_LENGTH",
        "schema.compiling:MAX_FANCY_TEXT",
        "schema.compiling:MAX_CHAIN",
        "schema.compiling:MAX_SCHEMA_DEPTH",
        "schema.compiling:MAX_SCHEMA_VALUES",
        "schema.references:MAX_SUBSCHEMAS",
        "schema.explain:MAX_ISSUES",
    ),
    "contract": (
        "contract.context:MAX_NESTED",
        "contract.grant:MAX_PATTERNS",
        "contract.grant:MAX_BLOCK_BYTES",
        "contract.grant:MAX_SUBSCHEMAS",
    ),
    "authority": (
        "authority.approvals:MAX_WAITING",
        "authority.queue:MAX_OPEN",
        "authority.queue:MAX_OPEN_BYTES",
        "authority.queue:MAX_ALL",
        "authority.queue:MAX_ALL_BYTES",
        "authority.queue:SHORT",
        "authority.queue:MAX_PAGE",
    ),
    "pubsub": ("pubsub.signing:MAX_AGE", "pubsub.websocket.target:MAX_BYTES"),
    "calls": (
        "calls.source.sending:CONNECT_SECONDS",
        "calls.source.sending:MAX_WAITING",
        "calls.source.sending:MAX_WAITING_BYTES",
        "calls.source.failure_detector:MAX_ATTEMPTS",
        "calls.source.client:DEFAULT_WINDOW",
        "calls.serving.jobs:DEFAULT_TIMEOUT",
        "calls.serving.jobs:MAX_UNREAD_BYTES",
        "calls.serving.admission:MAX_WAITING_BYTES",
    ),
    "server": (
        "server.http11.protocol:HEAD_SECONDS",
        "server.http11.protocol:HEAD_BYTES",
        "server.http11.protocol:BODY_SECONDS",
        "server.http11.exchange:SEND_SECONDS",
        "server.runs:INLINE_SECONDS",
        "server.signin.codes:CODE_SECONDS",
        "server.system:MAX_CALLS",
    ),
    "mcp": ("mcp.serving.sessions:MAX_EVENTS", "mcp.serving.sessions:MAX_EVENT_BYTES"),
    "runs": ("runs.session:CLEANUP_SECONDS",),
    "tools": ("tools.pages:LIFETIME", "tools.pages:MAX_BYTES", "tools.pages:MAX_CALLER_BYTES"),
    "agents": ("agents:MAX_TOOLS", "agents:MAX_BYTES"),
}
"""The constants that are promises, by the folder of the code."""

_MARKED = re.compile(r"<!--limits:(\w+)-->.*?<!---->", re.DOTALL)


def table(wing: str) -> str:
    """Return the limits of one folder in Markdown."""
    rows = "\n".join(f"| {_text(each)} | {_value(each)} |" for each in LIMITS[wing])
    return f"\n\n| limit | value |\n|---|--:|\n{rows}\n\n"


def filled(text: str) -> str:
    """Return a page with every marked table replaced."""
    return _MARKED.sub(lambda found: f"<!--limits:{found[1]}-->{table(found[1])}<!---->", text)


def missing(text: str) -> list[str]:
    """Return the folders whose table is not in a page."""
    return sorted(LIMITS.keys() - {found[1] for found in _MARKED.finditer(text)})


def _value(limit: str) -> str:
    module, name = _parts(limit)
    value = getattr(module, name)
    if "bytes" in _text(limit).lower() or name.endswith("BYTES"):
        for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
            if value >= size and value % size == 0:
                return f"{value // size} {unit}"
    return f"{value:,}" if isinstance(value, int) else f"{value:,g}"


def _text(limit: str) -> str:
    """Return the first sentence of the string below a constant."""
    module, name = _parts(limit)
    return _texts(inspect.getsource(module))[name]


def _parts(limit: str) -> tuple[Any, str]:
    module, _, name = limit.partition(":")
    return importlib.import_module(f"operations.{module}"), name


@cache
def _texts(source: str) -> dict[str, str]:
    found: dict[str, str] = {}
    body = ast.parse(source).body
    for statement, following in pairwise(body):
        match statement, following:
            case (
                ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                found[name] = " ".join(text.split()).split(". ")[0].removesuffix(".")
            case _:
                pass
    return found


if __name__ == "__main__":
    page = PAGE.read_text(encoding="utf-8")
    if absent := missing(page):
        sys.exit(f"{PAGE.name} has no table of {', '.join(absent)}: add <!--limits:NAME--><!---->")
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(filled(page), encoding="utf-8")
    elif filled(page) != page:
        sys.exit(f"{PAGE.name} differs from the code: run scripts/fixed_limits.py")
