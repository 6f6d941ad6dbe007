"""The configuration of MCP servers, and reading an mcp.json."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from operations import AccessControl
from operations.mcp import (
    MCPClient,
    MCPClientConfig,
    MCPClientCredentials,
    read_servers,
    unknown_keys,
)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"command": "a", "url": "http://x"},
        {"url": "file:///etc/passwd"},
        {"command": "a", "transport": "http"},
        {"url": "http://x", "transport": "stdio"},
        {"url": "http://x", "headers": {"X": "a\r\nEvil: 1"}},
    ],
)
def test_a_contradictory_configuration_is_rejected(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        MCPClientConfig(**fields)


def test_an_unknown_protocol_revision_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"version must be auto or one of .*2025-11-25"):
        MCPClient("a", MCPClientConfig(command="a", version="2023-01-01"))


@pytest.mark.requirement("R16")
def test_no_secret_is_shown() -> None:
    shown = repr(
        [
            MCPClientConfig(command="npx", args=["--token", "canary"], env={"KEY": "canary"}),
            MCPClientConfig(
                url="https://canary:canary@host/mcp?key=canary",
                headers={"Authorization": "canary"},
                auth="canary",
            ),
            MCPClientCredentials(client_id="me", client_secret="canary", issuer="https://issuer"),
        ]
    )

    assert "canary" not in shown
    assert "https://host/mcp" in shown


ENTRY = {"command": "npx", "args": ["-y", "server"], "env": {"A": "b"}}


@pytest.mark.parametrize(
    "document",
    [
        {"mcpServers": {"s": ENTRY}},
        {"servers": {"s": {"type": "stdio", **ENTRY}}, "inputs": []},
        {"mcp": {"servers": {"s": ENTRY}}, "editor.fontSize": 12},
        {"s": ENTRY},
        {
            "mcpServers": {
                "s": {**ENTRY, "alwaysAllow": ["*"], "disabled": False},
                "t": {"disabled": True},
            }
        },
    ],
)
def test_the_documents_of_other_tools_are_understood(document: Any, tmp_path: Path) -> None:
    file = tmp_path / "mcp.json"
    file.write_text(json.dumps(document))

    (entry,) = read_servers(file).values()
    config = MCPClientConfig.from_entry(entry)

    assert (config.command, config.args, config.env) == ("npx", ["-y", "server"], {"A": "b"})
    assert config.kind == "stdio"
    assert not config.trust_annotations


@pytest.mark.parametrize(
    ("entry", "kind"),
    [
        ({"url": "http://h/mcp"}, "http"),
        ({"type": "http", "url": "http://h/mcp"}, "http"),
        ({"type": "streamable-http", "url": "http://h/mcp"}, "http"),
        ({"transport": "streamableHttp", "serverUrl": "http://h/mcp"}, "http"),
        ({"httpUrl": "http://h/mcp"}, "http"),
        ({"type": "sse", "url": "http://h/sse"}, "sse"),
    ],
)
def test_remote_servers_in_an_mcp_json_are_read(entry: dict[str, Any], kind: str) -> None:
    assert MCPClientConfig.from_entry(entry).kind == kind


def test_references_to_the_environment_are_replaced_at_any_depth() -> None:
    config = MCPClientConfig.from_entry(
        {
            "url": "https://${HOST}/mcp",
            "headers": {"Authorization": "Bearer ${env:TOKEN}", "X": "${MISSING:-none}"},
        },
        {"HOST": "example.org", "TOKEN": "t"},
    )

    assert config.url == "https://example.org/mcp"
    assert config.headers == {"Authorization": "Bearer t", "X": "none"}


@pytest.mark.parametrize(
    ("entry", "named"),
    [
        ({"command": "${NOT_SET_ANYWHERE}"}, "NOT_SET_ANYWHERE"),
        ({"command": ["a"]}, "command"),
        ({"command": "a", "args": "b"}, "args"),
        ({"command": "a", "env": {"A": 1}}, "env"),
        ({"url": "http://x", "type": "carrier-pigeon"}, "carrier-pigeon"),
        ({"args": []}, "needs a command"),
        ({"commnd": "a"}, 'commnd is not a known key. Did you mean "command"?'),
        ({"command": "a", "env": {"KEY": "${input:key}"}}, "would ask a person"),
    ],
)
def test_a_wrong_entry_is_explained(entry: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=re.escape(named)):
        MCPClientConfig.from_entry(entry, {})


def test_an_entry_takes_the_fields_of_the_config(caplog: pytest.LogCaptureFixture) -> None:
    access = AccessControl(["files"])
    entry = {
        "command": "a",
        "trust_annotations": True,
        "connectTimeout": 3,
        "max_timeout": None,
        "args": None,
        "access": access,
    }

    config = MCPClientConfig.from_entry(entry)

    assert (config.trust_annotations, config.connect_timeout) == (True, 3)
    assert (config.max_timeout, config.args) == (None, ())
    assert config.access is access
    assert not caplog.text
    for wrong in ({"trust_annotations": "no"}, {"connect_timeout": -1}, {"access": ["files"]}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            MCPClientConfig.from_entry({**entry, **wrong})


def test_an_unknown_key_is_reported_and_ignored(
    caplog: pytest.LogCaptureFixture,
) -> None:
    entry = {"command": "a", "arg": ["b"], "colour": 7, "autoApprove": ["x"], "timeout": 60}

    assert MCPClientConfig.from_entry(entry).command == "a"
    assert unknown_keys(entry) == {
        "arg": 'is not a known key. Did you mean "args"?',
        "colour": "is not a known key.",
    }
    assert 'arg is not a known key. Did you mean "args"?' in caplog.text
    assert "autoApprove" not in caplog.text


@pytest.mark.parametrize("key", ["mcpServer", "mcpservers", "mcp_servers", "server"])
def test_misspelt_server_tables_are_rejected_with_the_correct_name(key: str) -> None:
    with pytest.raises(ValueError, match=f"'{key}' is not a known key. Did you mean"):
        read_servers({key: {"files": {"command": "a"}}})


@pytest.mark.parametrize("name", ["server", "my-servers"])
def test_a_server_with_a_similar_name_is_not_misspelt(name: str) -> None:
    assert read_servers({name: {"command": "a"}}) == {name: {"command": "a"}}


@pytest.mark.parametrize("document", ["[]", '{"mcpServers": {"a": 1}}', "nonsense"])
def test_a_file_of_another_kind_is_rejected(document: str, tmp_path: Path) -> None:
    file = tmp_path / "mcp.json"
    file.write_text(document)

    with pytest.raises(ValueError, match=r"\w"):
        read_servers(file)


def test_a_file_with_comments_and_trailing_commas_is_read(tmp_path: Path) -> None:
    file = tmp_path / "mcp.json"
    file.write_text(
        '\ufeff{ // the servers\n  "servers": {\n    /* one,\n } */ '
        '"s": {"command": "a//b", "args": ["/*x*/", ",]",], },\n  },\n}\n'
    )

    (entry,) = read_servers(file).values()

    assert entry == {"command": "a//b", "args": ["/*x*/", ",]"]}


@pytest.mark.parametrize(
    "text", ['{"mcpServers": {"a" 1}}', '{"mcpServers": {"a": }}', "// nothing"]
)
def test_a_file_that_is_not_an_mcp_json_is_rejected(text: str, tmp_path: Path) -> None:
    file = tmp_path / "mcp.json"
    file.write_text(text)

    with pytest.raises(ValueError):  # noqa: PT011 - msgspec's own words
        read_servers(file)


def test_the_tool_lists_of_other_clients_are_honoured() -> None:
    entry = {
        **ENTRY,
        "includeTools": ["read", "write"],
        "excludeTools": ["write"],
        "disabledTools": ["drop"],
        "deny": ["x_*"],
    }

    config = MCPClientConfig.from_entry(entry)

    assert list(config.allow or ()) == ["read", "write"]
    assert sorted(config.deny) == ["drop", "write", "x_*"]
    with pytest.raises(ValueError, match="'includeTools' has the same meaning as 'allow'"):
        MCPClientConfig.from_entry({**entry, "allow": ["read"]})


def test_an_env_file_adds_to_the_environment_and_is_not_shown(tmp_path: Path) -> None:
    folder = tmp_path / ".vscode"
    folder.mkdir()
    (tmp_path / ".env").write_text(
        '# keys\nexport TOKEN="can ary"\nNAME = plain # a note\nEMPTY=\nA=hidden\nURL=http://h/#x\n'
    )
    for named in ("../.env", "${workspaceFolder}/.env"):
        (folder / "mcp.json").write_text(
            json.dumps({"servers": {"s": {**ENTRY, "envFile": named}}})
        )
        (entry,) = read_servers(folder / "mcp.json").values()

        config = MCPClientConfig.from_entry(entry)

        assert config.env == {
            "TOKEN": "can ary",
            "NAME": "plain",
            "EMPTY": "",
            "A": "b",
            "URL": "http://h/#x",
        }
        assert "can ary" in config.secrets
        assert "can ary" not in repr(config)


@pytest.mark.parametrize("folder", [".vscode", ".cursor", "."])
def test_variables_of_editors_are_replaced_in_a_file(tmp_path: Path, folder: str) -> None:
    path = tmp_path / folder / "mcp.json"
    path.parent.mkdir(exist_ok=True)
    texts = ["src=${workspaceFolder},dst=/w", "${userHome}${/}x${pathSeparator}", "${A:-b}"]
    entry = {"command": "x", "args": texts, "env": {"N": "${workspaceFolderBasename}"}}
    path.write_text(json.dumps({"servers": {"s": entry}}))

    config = MCPClientConfig.from_entry(read_servers(path)["s"], {})

    assert config.args == [f"src={tmp_path},dst=/w", f"{Path.home()}/x/", "b"]
    assert config.env == {"N": tmp_path.name}


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("""T="abc" # was "old\"""", "abc"),
        ("""T='a "b" c' # it's a note""", 'a "b" c'),
        ("""T="a#b" """, "a#b"),
        ('T=""', ""),
    ],
)
def test_a_quoted_value_ends_at_its_quote(tmp_path: Path, line: str, value: str) -> None:
    (tmp_path / ".env").write_text(line)

    config = MCPClientConfig.from_entry({"command": "x", "envFile": str(tmp_path / ".env")})

    assert config.env == {"T": value}


def test_an_unreadable_env_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="envFile names no file"):
        MCPClientConfig.from_entry({**ENTRY, "envFile": str(tmp_path / "none")})
    (tmp_path / ".env").write_text("A=1\nnot a variable\n")
    with pytest.raises(ValueError, match=r"line 2 of .* is not NAME=value"):
        MCPClientConfig.from_entry({**ENTRY, "envFile": str(tmp_path / ".env")})
