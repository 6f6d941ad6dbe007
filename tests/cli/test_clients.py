"""`operations install` and `operations discover`: the files of MCP clients."""

import json
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.cli.conftest import Ran

Run = Callable[..., Ran]

FILES = {
    "claude": ".claude.json",
    "codex": ".codex/config.toml",
    "gemini": ".gemini/settings.json",
    "cursor": ".cursor/mcp.json",
    "vscode": ".config/Code/User/mcp.json",
}


@pytest.fixture(autouse=True)
def home(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = folder / "home"
    home.mkdir()
    monkeypatch.setenv("HOME", str(home))
    for variable in ("CLAUDE_CONFIG_DIR", "CODEX_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(variable, raising=False)
    return home


@pytest.mark.parametrize("client", FILES)
def test_the_change_is_shown_and_then_written(run: Run, home: Path, client: str) -> None:
    path = home / FILES[client]

    shown = run("install", client)
    assert shown.code == 0
    assert "operations.toml" in shown.out
    assert "nothing was written" in shown.err
    assert not path.exists()

    written = run("install", client, "--yes")
    assert written.code == 0
    assert "operations.toml" in path.read_text()
    assert ("not tested" in written.err) == (client in ("cursor", "vscode"))
    assert path.stat().st_mode & 0o077 == 0

    again = run("install", client, "--yes")
    assert again.out == ""
    found = run("discover", "--json").json
    assert [(each["name"], each["place"].split()[1:]) for each in found] == [
        ("operations", ["serve", str(Path.cwd() / "operations.toml"), "--stdio"])
    ]


def test_everything_else_in_a_file_stays(run: Run, home: Path) -> None:
    path = home / ".claude.json"
    before = {"theme": "dark", "mcpServers": {"other": {"command": "x"}}, "ümlaut": [1.5, None]}
    path.write_text(json.dumps(before, indent=4))
    path.chmod(0o644)
    assert run("install", "claude", "ops.py", "--yes", "--name", "mine").code == 0

    after = json.loads(path.read_text())
    mine = after["mcpServers"].pop("mine")
    assert after == before
    assert mine["args"][-2:] == [str(Path.cwd() / "ops.py"), "--stdio"]
    assert path.stat().st_mode & 0o777 == 0o644

    toml = home / ".codex" / "config.toml"
    toml.parent.mkdir()
    toml.write_text('# mine\nmodel = "x"\n[mcp_servers.other]\ncommand = "y"')
    assert run("install", "codex", "--yes").code == 0
    assert toml.read_text().startswith('# mine\nmodel = "x"\n[mcp_servers.other]\ncommand = "y"\n')
    assert set(tomllib.loads(toml.read_text())["mcp_servers"]) == {"other", "operations"}


@pytest.mark.parametrize("text", ['{"servers": {} // comment\n}', "[]", '{"servers": 1}'])
def test_a_file_that_would_lose_something_is_left_alone(run: Run, home: Path, text: str) -> None:
    path = home / FILES["vscode"]
    path.parent.mkdir(parents=True)
    path.write_text(text)
    ran = run("install", "vscode", "--yes")
    assert ran.code == 1
    assert path.read_text() == text
    assert "not written" in ran.err


def test_an_address_is_written_in_the_form_of_each_client(run: Run, home: Path) -> None:
    url = "http://127.0.0.1:8000/mcp"
    for client, file in FILES.items():
        assert run("install", client, "--url", url, "--yes").code == 0
        assert url in (home / file).read_text()
    assert {each["place"] for each in run("discover", "--json").json} == {url}
    refused = run("install", "claude", "--url", "http://127.0.0.1/mcp?key=CANARY", "--yes")
    assert refused.code == 1


def test_no_secret_is_printed_or_copied(run: Run, folder: Path, home: Path) -> None:
    servers = {
        "files": {
            "command": "npx",
            "args": [
                "-y",
                "server",
                "--api-key",
                "CANARY1",
                "--token=CANARY2",
                "CANARY3aZ9bY8cX7dW6eV5fU4gT",
            ],
            "env": {"API_KEY": "CANARY4"},
        },
        "web": {
            "url": "https://user:CANARY5@mcp.example/mcp?key=CANARY6",
            "headers": {"Authorization": "Bearer CANARY7"},
        },
    }
    (home / ".cursor").mkdir()
    (home / ".cursor" / "mcp.json").write_text(json.dumps({"mcpServers": servers}))

    for arguments in (
        ("discover",),
        ("discover", "--json"),
        ("discover", "--add", "files", "--add", "web"),
    ):
        ran = run(*arguments)
        assert ran.code == 0, ran.err
        assert "CANARY" not in ran.out + ran.err
        assert "API_KEY" in ran.out
    for words in (
        'env = { FILES_API_KEY = { env = "FILES_API_KEY" } }',
        'env = { FILES_TOKEN = { env = "FILES_TOKEN" } }',
        'env = { FILES_SECRET = { env = "FILES_SECRET" } }',
        'headers = { Authorization = { env = "WEB_AUTHORIZATION" } }',
        "set the variable API_KEY where",
        "set the variable WEB_AUTHORIZATION where",
    ):
        assert words in ran.err
    config = tomllib.loads((folder / "operations.toml").read_text())
    assert "CANARY" not in str(config)
    assert config["modules"] == ["ops.py"]
    assert config["mcp"]["files"]["env"] == {"API_KEY": {"env": "API_KEY"}}
    assert config["mcp"]["web"]["headers"] == {"Authorization": {"env": "WEB_AUTHORIZATION"}}
    assert run("discover", "--add", "files").code == 3, "it is there already"
    assert run("discover", "--add", "nope").code == 1
