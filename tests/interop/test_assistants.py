"""`operations install` writes files that Claude Code, Codex and Gemini CLI read (`scripts/matrix assistants`)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.conftest import PROJECT
from tests.limits import scaled

PROGRAMS = os.environ.get("OPERATIONS_ASSISTANTS", "")
"""The folder of the programs from npm."""


@pytest.mark.skipif(not PROGRAMS, reason="scripts/matrix assistants installs the programs")
@pytest.mark.parametrize("client", ["claude", "codex", "gemini"])
def test_an_assistant_lists_the_installed_server(tmp_path: Path, client: str) -> None:
    (tmp_path / "app.py").write_text("")
    environment = {
        **os.environ,
        "HOME": str(tmp_path),
        "PATH": f"{PROGRAMS}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(PROJECT / "src"),
    }
    for variable in ("CLAUDE_CONFIG_DIR", "CODEX_HOME"):
        environment.pop(variable, None)

    def run(*command: str) -> str:
        ran = subprocess.run(
            command, cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=scaled(120), check=True,
        )  # fmt: skip
        return ran.stdout

    run(sys.executable, "-m", "operations", "install", client, "app.py", "--yes", "--name", "tasks")
    listed = run(client, "mcp", "list")

    (line,) = [each for each in listed.splitlines() if "tasks" in each]
    assert f"{tmp_path}/app.py --stdio" in line
