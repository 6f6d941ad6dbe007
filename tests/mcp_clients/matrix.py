"""The client matrix: the results that many MCP clients get from one hub.
`scripts/matrix [ROW ...]` prints it as a table.

Rule 1: every client has a separate environment under `.matrix/`, because clients need different versions of the same
packages; the environment of the project is not changed.
Rule 2: a client reports its results; this module has the expected results.
"""

import fcntl
import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.servers import installer_environment

from operations.mcp.serving.tools import MISMATCH

HERE = Path(__file__).parent
PROJECT = HERE.parents[1]
FOLDER = PROJECT / ".matrix"
_SECONDS = 180
_INSTALL_SECONDS = 600

TOOLS = sorted(f"matrix__{name}" for name in ("add", "fail", "mismatch", "steps", "task", "tasks"))
ERROR = [True, 'LOCKED: in use\n{"by":"ann"}']
EXPECTED: dict[str, Any] = {
    "list": TOOLS,
    "call": 3,
    "error": ERROR,
    "mismatch": [True, MISMATCH],
    "progress": [1, 2, 3],
    "structured": {"id": "t7", "done": False},
    "typed": {"id": "string", "done": "boolean"},
    "items": [{"id": "t1", "done": True}],
    "prompt": "Greet Ann.",
    "resource": "Be kind.",
}
"""The expected result of each cell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A client.

    Attributes:
        packages: What to install, from PyPI or npm.
        look: Returns what the client sees, given its environment and the address of the hub.
        missing: Cells that this client has no means for.
        unwraps: Whether the client takes results that are no objects out of their box.
    """

    packages: Sequence[str]
    look: Callable[[Path, str], Mapping[str, Any]]
    missing: Sequence[str] = ()
    unwraps: bool = False


class MatrixError(Exception):
    """Raised if a client cannot be installed or does not report."""


def _python(kind: str) -> Callable[[Path, str], Mapping[str, Any]]:
    def look(place: Path, url: str) -> Mapping[str, Any]:
        return _json([str(place / "bin/python"), str(HERE / "python_client.py"), kind, url])

    return look


def _placed(name: str, place: Path) -> Path:
    """Copy a script into an environment, because Node looks for packages beside it; other tests may be reading it."""
    copy, script = place / f"{name}.{os.getpid()}", place / name
    shutil.copy(HERE / name, copy)
    return copy.replace(script)


def _typescript(version: str) -> Callable[[Path, str], Mapping[str, Any]]:
    def look(place: Path, url: str) -> Mapping[str, Any]:
        script = _placed("typescript.mjs", place)
        return _json([_node(place), str(script), version, url])

    return look


def sign_in_with_typescript(url: str, *client_id: str) -> Any:
    """Return what the OAuth client of the TypeScript SDK sees of a hub; without an id it registers.

    Raises:
        MatrixError: If it cannot be installed or does not report.
    """
    place = prepare("typescript-1")
    script = _placed("oauth.mjs", place)
    return _json([_node(place), str(script), url, *client_id])


@contextmanager
def oidc_provider(resource: str, *, registers: bool) -> Generator[str]:
    """Start a certified OpenID provider, which issues tokens for `resource`, and return its address.

    Raises:
        MatrixError: If it cannot be installed or does not start.
    """
    place = prepare("oidc-provider")
    script = _placed("oidc_provider.mjs", place)
    command = [_node(place), str(script), resource, "on" if registers else "off"]
    with _first_line(command, "the OpenID provider") as url:
        yield url


def _inspector(place: Path, url: str) -> Mapping[str, Any]:
    def ask(method: str, *arguments: str) -> dict[str, Any]:
        program = place / "node_modules/.bin/mcp-inspector"
        return _json([_node(place), str(program), "--cli", url, "--method", method, *arguments])

    def called(name: str, *arguments: str) -> dict[str, Any]:
        pairs = [part for argument in arguments for part in ("--tool-arg", argument)]
        return ask("tools/call", "--tool-name", f"matrix__{name}", *pairs)

    failed, mismatched = called("fail"), called("mismatch")
    listed = {tool["name"]: tool for tool in ask("tools/list")["tools"]}
    typed = listed["matrix__task"]["outputSchema"]["properties"]
    greeting = ask("prompts/get", "--prompt-name", "matrix__greet", "--prompt-args", "name=Ann")
    return {
        "list": sorted(listed),
        "call": called("add", "a=1", "b=2").get("structuredContent"),
        "error": [failed.get("isError"), failed["content"][0]["text"]],
        "mismatch": [mismatched.get("isError"), mismatched["content"][0]["text"]],
        "structured": called("task", "id=t7").get("structuredContent"),
        "typed": {name: schema["type"] for name, schema in typed.items()},
        "items": called("tasks").get("structuredContent"),
        "prompt": greeting["messages"][0]["content"]["text"],
        "resource": ask("resources/read", "--uri", "matrix://motd")["contents"][0]["text"],
    }


ROWS: dict[str, Row] = {
    "python-mcp-1": Row(packages=["mcp==1.30.0"], look=_python("mcp1")),
    "python-mcp-2": Row(packages=["mcp==2.3.0"], look=_python("mcp2")),
    "python-mcp-2-legacy": Row(packages=["mcp==2.3.0"], look=_python("mcp2-legacy")),
    "fastmcp-2": Row(packages=["fastmcp==2.14.7"], look=_python("fastmcp"), unwraps=True),
    "fastmcp-4": Row(packages=["fastmcp==4.1.2"], look=_python("fastmcp"), unwraps=True),
    "langchain": Row(
        packages=["langchain-mcp-adapters==0.3.2", "mcp==1.30.0"],
        look=_python("langchain"),
        missing=["typed"],
    ),
    "typescript-1": Row(packages=["@modelcontextprotocol/sdk@1.32.2"], look=_typescript("1")),
    "typescript-1.10": Row(packages=["@modelcontextprotocol/sdk@1.10.2"], look=_typescript("1")),
    "typescript-1.12": Row(packages=["@modelcontextprotocol/sdk@1.12.3"], look=_typescript("1")),
    "typescript-2": Row(packages=["@modelcontextprotocol/client@2.4.0"], look=_typescript("2")),
    "inspector": Row(
        packages=["@modelcontextprotocol/inspector@2.12.0", "node@22"],
        look=_inspector,
        missing=["progress"],
    ),
}

SERVERS = {
    "chromadb": ["chromadb==1.5.9"],
    "oidc-provider": ["oidc-provider@9.13.3", "node@22"],
}
"""The packages of servers that tests start."""


def prepare(name: str) -> Path:
    """Install a client or a server, once, and return its environment.

    Raises:
        MatrixError: If it cannot be installed.
    """
    FOLDER.mkdir(exist_ok=True)
    # Tests in several processes use one environment.
    with (FOLDER / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        packages = SERVERS[name] if name in SERVERS else ROWS[name].packages
        return _prepare(packages, FOLDER / name)


def _prepare(wanted: Sequence[str], place: Path) -> Path:
    mark, packages = place / "installed", " ".join(wanted)
    if mark.is_file() and mark.read_text(encoding="utf-8") == packages:
        return place
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    if any(package.startswith(("@", "node")) for package in wanted):
        npm = shutil.which("npm")
        if npm is None:
            raise MatrixError("npm is not installed")
        (place / "package.json").write_text('{"private": true, "type": "module"}', encoding="utf-8")
        command = [npm, "install", "--silent", "--no-audit", "--no-fund", *wanted]
    else:
        venv.create(place, with_pip=True)
        pip = [str(place / "bin/python"), "-m", "pip", "install", "--quiet"]
        command = [*pip, "--disable-pip-version-check", *wanted]
    _run(command, _INSTALL_SECONDS, cwd=place)
    mark.write_text(packages, encoding="utf-8")
    return place


def judge(name: str, url: str) -> dict[str, str]:
    """Return what is wrong in each cell of a row; empty if nothing is, `-` if the client has no means for it.

    Raises:
        MatrixError: If the client cannot be installed or does not report.
    """
    row = ROWS[name]
    seen = row.look(prepare(name), url)
    return {
        cell: "-" if cell in row.missing else _fault(seen.get(cell), expected, row)
        for cell, expected in EXPECTED.items()
    }


def _fault(seen: Any, expected: Any, row: Row) -> str:
    # Before 2026-07-28 a result that is not an object is wrapped, and few clients unwrap it.
    if seen == expected or (not row.unwraps and seen == {"result": expected}):
        return ""
    return f"expected {json.dumps(expected)}, saw {json.dumps(seen)}"


@contextmanager
def serving() -> Generator[str]:
    """Start the hub in a separate process, and return its address."""
    with _first_line([sys.executable, "-m", "tests.mcp_clients.hub"], "the hub") as url:
        yield url


@contextmanager
def _first_line(command: Sequence[str], what: str) -> Generator[str]:
    """Start a server in a separate process, and return the line that it prints."""
    with subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            line = server.stdout.readline().strip()
            if not line:
                raise MatrixError(f"{what} did not start")
            yield line
        finally:
            server.terminate()


def _node(place: Path) -> str:
    own = place / "node_modules/.bin/node"
    found = str(own) if own.is_file() else shutil.which("node")
    if found is None:
        raise MatrixError("Node is not installed")
    return found


def _json(command: Sequence[str]) -> dict[str, Any]:
    output = _run(command, _SECONDS)
    try:
        seen: dict[str, Any] = json.loads(output)
    except ValueError:
        raise MatrixError(f"{command[1]} printed no JSON: {output[-500:]}") from None
    return seen


def _run(command: Sequence[str], seconds: float, cwd: Path | None = None) -> str:
    own = str(Path(command[0]).parent)
    environment = {**installer_environment(), "PATH": f"{own}{os.pathsep}{os.environ['PATH']}"}
    try:
        done = subprocess.run(
            command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=seconds, check=False
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise MatrixError(f"{' '.join(command)} did not end within {seconds} s") from None
    # The Inspector exits with an error if the result of a tool is an error; its output is complete nevertheless.
    if done.returncode != 0 and not done.stdout.startswith("{"):
        raise MatrixError(f"{' '.join(command)} failed: {(done.stderr or done.stdout)[-1500:]}")
    return done.stdout


def main(names: Sequence[str]) -> int:
    """Print the rows `names`, or all, and return the exit code."""
    unknown = [name for name in names if name not in ROWS]
    if unknown:
        print(f"unknown row: {', '.join(unknown)}; there are {', '.join(ROWS)}", file=sys.stderr)
        return 2
    width = max(map(len, ROWS))
    print(" ".join([" " * width, *EXPECTED]))
    faults: list[str] = []
    with serving() as url:
        for name in names or ROWS:
            try:
                cells = judge(name, url)
            except MatrixError as error:
                print(f"{name.ljust(width)} {error}", flush=True)
                faults.append(name)
                continue
            marks = [
                ("-" if cells[cell] == "-" else "FAIL" if cells[cell] else "ok").ljust(len(cell))
                for cell in EXPECTED
            ]
            print(" ".join([name.ljust(width), *marks]), flush=True)
            wrong = {cell: fault for cell, fault in cells.items() if fault not in ("", "-")}
            faults += [f"{name}, {cell}: {fault}" for cell, fault in wrong.items()]
    for fault in faults:
        print(fault, file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
