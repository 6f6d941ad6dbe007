"""`operations.toml`: its settings are applied, and its issues are reported with advice."""

import dataclasses
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import msgspec
import pytest
from tests.conftest import PROJECT
from tests.limits import scaled

from operations import AccessControl, Schema
from operations.authority import ApprovalRule
from operations.authority.ledger import LedgerEntry
from operations.calls.kind import BrokerEntry
from operations.cli.setup import starter
from operations.config import (
    Config,
    ConfigError,
    ConfigFile,
    Secret,
    config_schema,
    find_config,
    load_config,
    parse_config,
)
from operations.config.checks import KeyLines
from operations.config.model import (
    CodeEntry,
    JWTEntry,
    KeyEntry,
    LimitsEntry,
    LogEntry,
    RunsEntry,
    ScheduleEntry,
    ServeEntry,
    TelemetryEntry,
    ToolEntry,
    WorkEntry,
    config_class,
    entries_of,
)
from operations.contract.options import (
    ADVANCED,
    MISSING,
    _options,
    advanced_keys,
    file_class,
    keys_of,
)
from operations.front.config import MCPServerSettings, ServerConfig
from operations.hub.place import HubPlace
from operations.mcp.config import MCPClientConfig, read_servers
from operations.mcp.kind import MCPEntry, client_config
from operations.openapi import (
    BasicCredential,
    ClientCredentials,
    HTTPAuth,
    HTTPServiceConfig,
    LinkPaging,
    OffsetPaging,
    PagePaging,
    PasswordCredentials,
    RefreshToken,
    URLPaging,
)
from operations.openapi.kind import OpenAPIEntry, service_config
from operations.recorder.audit import AuditConfig
from operations.recorder.graph import TraceEntry
from operations.sources.contract import Entry, SourceEntry
from operations.sources.credentials import TokenExchange
from operations.tools import ToolConfig

FULL = """
modules = ["ops", "app.tasks"]
mcp_json = ["mcp.json"]
output = "strict"

[openapi.shop]
document = "shop.yaml"
base_url = "https://shop.example.com/v1"
auth = { type = "bearer", token = { env = "SHOP_TOKEN" } }
headers = { X-Client = "hub", X-Key = { file = "key.txt" } }
include = { methods = ["get"], paths = ["/orders*"] }
scopes = ["shop:use"]

[openapi.shop.credentials]
oauth = { client_id = "me", client_secret = { env = "SECRET" }, scopes = ["read"] }
login = { username = "me", password = { file = "password.txt" } }

[mcp.files]
command = "server"
args = ["--root", "."]
env = { TOKEN = { env = "FILES_TOKEN" }, MODE = "fast" }
queries = ["read_*"]

[mcp.remote]
url = "https://mcp.example.com/mcp"
token = { env = "REMOTE_TOKEN" }
pin = "strict"

[brokers.main]
url = "redis://127.0.0.1:6379"
workers = true

[access.keys.alice]
key = { env = "ALICE_KEY" }
scopes = ["task:write"]
resources = { "project:1" = ["read"] }

[access.jwt]
issuer = "https://id.example.com"
audience = "hub"
jwks_url = "https://id.example.com/jwks"

[serve]
host = "0.0.0.0"
port = 0
console = false

[limits]
timeout = 5
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the files that the configs of this module name."""
    (tmp_path / "ops").mkdir()
    for name in ("shop.yaml", "mcp.json"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "key.txt").write_text(" k3y \n")
    return tmp_path


def test_a_config_with_everything_becomes_frozen_dataclasses(folder: Path) -> None:
    config = parse_config(FULL, folder / "operations.toml")

    assert config.modules == ("ops", "app.tasks")
    assert config.tables("openapi")["shop"].scopes == ("shop:use",)
    assert config.tables("openapi")["shop"].options["auth"]["token"] == {"env": "SHOP_TOKEN"}
    assert config.tables("mcp")["remote"].token == Secret(env="REMOTE_TOKEN")
    assert config.tables("mcp")["files"].options["args"] == ["--root", "."]
    assert config.access.keys["alice"].options["resources"] == {"project:1": ["read"]}
    assert config.access.jwt is not None
    assert config.access.jwt.options["audience"] == "hub"
    assert config.serve.options["console"] is False
    assert config.limits.timeout == 5
    with pytest.raises(AttributeError):
        config.modules = ()  # type: ignore[misc]


def test_an_empty_file_is_a_config(tmp_path: Path) -> None:
    assert parse_config("", tmp_path / "operations.toml") == config_class()()


def test_a_whole_number_with_a_decimal_point_is_an_integer(tmp_path: Path) -> None:
    text = "[serve]\nport = 80.0\nprocesses = 2e0\nconsole = false\n[limits]\ntimeout = 2.5"

    config = parse_config(text, tmp_path / "operations.toml")

    assert (repr(config.serve.options["port"]), repr(config.serve.processes)) == ("80", "2")
    assert config.limits.timeout == 2.5


def test_the_starting_file_is_a_config_with_and_without_its_comments(tmp_path: Path) -> None:
    (tmp_path / "hello.py").touch()
    text = starter("config.toml")
    parse_config(text, tmp_path / "operations.toml")

    lines = text.splitlines()
    bare = [
        line.removeprefix("# ") for line in lines if "=" in line or line.startswith(("[", "# ["))
    ]
    document = tomllib.loads("\n".join(bare))

    assert Schema(config_schema().document).errors(document) == []
    assert {"modules", "mcp_json", "openapi", "mcp", "brokers", "access", "serve", "limits"} <= set(
        document
    )


def test_the_schema_is_for_editors_too() -> None:
    document = json.loads(json.dumps(config_schema().document))

    assert document["$schema"].endswith("2020-12/schema")
    assert "null" not in json.dumps(document)
    for entry in (document, *document["$defs"].values()):
        for name, schema in entry["properties"].items():
            assert schema.get("description"), name


SHOP = "[openapi.shop]\ndocument = 'shop.yaml'\n"
JWT = "[access.jwt]\nissuer = 'a'\naudience = 'b'\nsecret = { env = 'A' }"

MISTAKES: list[tuple[str, str, int | None, str, str]] = [
    # name, text, line, key, words of the message
    ("not TOML", "modules = [", 1, "", "this is not TOML"),
    ("a value without quotes", "output = cast", 1, "", "this is not TOML"),
    ("a table twice", "[serve]\nport = 1\n[serve]\n", 3, "", "this is not TOML: Cannot declare"),
    ("a key twice", "output = 'off'\noutput = 'off'", 2, "", "this is not TOML: Cannot overwrite"),
    ("a misspelt key", "[serve]\nprot = 1", 2, "serve.prot", 'Did you mean "port"?'),
    ("a misspelt table", "[opanapi.shop]\ndocument = 'x'", 1, "opanapi", 'Did you mean "openapi"?'),
    ("a key of another table", "port = 1", 1, "port", 'Did you mean "serve.port"?'),
    ("an unknown key", "[limits]\nzzzz = 1", 2, "limits.zzzz", "Known keys: timeout"),
    (
        "a string for a number",
        "[serve]\nport = '8000'",
        2,
        "serve.port",
        "must be an integer, not a string",
    ),
    ("a number for a string", "[serve]\nhost = 1", 2, "serve.host", "must be a string"),
    ("a port too large", "[serve]\nport = 70000", 2, "serve.port", "must be at most 65535"),
    ("a time of nothing", "[limits]\ntimeout = 0", 2, "limits.timeout", "must be more than 0"),
    ("a negative limit", "[limits]\ncalls = -1", 2, "limits.calls", "must be at least 1"),
    (
        "a limit that is no number",
        "[limits]\nadvanced.body_seconds = nan",
        2,
        "limits.advanced.body_seconds",
        "",
    ),
    ("no list", "modules = 'ops'", 1, "modules", "must be a list"),
    ("a number in a list", "modules = [\n  'ops',\n  3,\n]", 1, "modules[1]", "must be a string"),
    ("no table", "serve = 8000", 1, "serve", "Write it as [serve]"),
    ("an unknown value", "output = 'casts'", 1, "output", 'Did you mean "cast"?'),
    (
        "a name for many",
        "[tools.'a.*']\nrename = 'a.b'",
        2,
        'tools."a.*".rename',
        "not for a pattern",
    ),
    ("no pointer", "[tools.a]\nselect = ['x']", 2, "tools.a.select", "begin with /"),
    ("no policy", "[tools.a]\noutput = 'x'", 2, "tools.a.output", "must be"),
    ("a misspelt switch", "[serve]\nconsol = false", 2, "serve.consol", 'Did you mean "console"?'),
    ("open to the world", "[serve]\nhost = '0.0.0.0'", 2, "serve.host", "without authentication"),
    (
        "any origin",
        "[serve]\nallowed_origins = ['*']",
        2,
        "serve.allowed_origins[0]",
        "https://example.com",
    ),
    ("a module without a name", "modules = ['']", 1, "modules[0]", "is empty"),
    ("no document", "[openapi.shop]\n", 1, "openapi.shop.document", "is missing. The OpenAPI"),
    (
        "a document without a name",
        "[openapi.shop]\ndocument = ''",
        2,
        "openapi.shop.document",
        "is empty",
    ),
    (
        "an address of another kind",
        "[openapi.shop]\ndocument = 'ftp://x/y'",
        2,
        "openapi.shop.document",
        "http:// or https://",
    ),
    (
        "a base that is no address",
        SHOP + "base_url = 'shop.example.com'",
        3,
        "openapi.shop.base_url",
        "http:// or https://",
    ),
    (
        "a login in an address",
        SHOP + "base_url = 'https://u:CANARY@x/'",
        3,
        "openapi.shop.base_url",
        "move it to auth",
    ),
    (
        "a secret in the file",
        SHOP + "[openapi.shop.auth]\ntype = 'bearer'\ntoken = 'CANARY'",
        5,
        "openapi.shop.auth.token",
        "secrets do not belong in this file",
    ),
    (
        "a secret in a header",
        SHOP + "[openapi.shop.headers]\nAuthorization = 'CANARY'",
        4,
        "openapi.shop.headers.Authorization",
        "is a secret",
    ),
    (
        "a secret as a variable's name",
        "[mcp.a]\nurl = 'http://a/'\ntoken = { env = 'sk-CANARY-1' }",
        3,
        "mcp.a.token.env",
        "Is it the secret itself?",
    ),
    (
        "a secret from two places",
        "[mcp.a]\nurl = 'http://a/'\ntoken = { env = 'A', file = 'b' }",
        3,
        "mcp.a.token",
        "exactly one of env and file",
    ),
    (
        "an unknown kind of auth",
        SHOP + "auth = { type = 'Bearer', token = { env = 'A' } }",
        3,
        "openapi.shop.auth.type",
        'Did you mean "bearer"?',
    ),
    (
        "half a login",
        SHOP + "credentials.a = { client_id = 'x' }",
        3,
        "openapi.shop.credentials.a.client_secret",
        "is required with client_id",
    ),
    (
        "two credentials in one",
        SHOP + "credentials.a = { env = 'A', username = 'x' }",
        3,
        "openapi.shop.credentials.a",
        "exactly one of",
    ),
    (
        "an advanced key among the others",
        "[limits]\nvalues = 5",
        2,
        "limits.values",
        "is an advanced key: write it into [limits.advanced].",
    ),
    (
        "an advanced key with a typing error",
        "[openapi.a]\ndocument = 'a'\nmax_respons_bytes = 5",
        3,
        "openapi.a.max_respons_bytes",
        'Did you mean "advanced.max_response_bytes"?',
    ),
    (
        "a key that is not advanced",
        "[limits.advanced]\ncalls = 5",
        2,
        "limits.advanced.calls",
        "is not an advanced key: write it into [limits].",
    ),
    (
        "a typing error among the advanced keys",
        "[serve.mcp.advanced]\npage_sze = 5",
        2,
        "serve.mcp.advanced.page_sze",
        'Did you mean "page_size"?',
    ),
    (
        "an advanced key without its table",
        "depth = 5",
        1,
        "depth",
        'Did you mean "limits.advanced.depth"?',
    ),
    (
        "a wrong value of an advanced key",
        "[mcp.a]\ncommand = 'x'\n[mcp.a.advanced]\nmax_tools = 'x'",
        4,
        "mcp.a.advanced.max_tools",
        "must be an integer",
    ),
    (
        "an unknown kind of paging",
        SHOP + "advanced.pagination = { list = { kind = 'pge' } }",
        3,
        "openapi.shop.advanced.pagination.list.kind",
        'Did you mean "page"?',
    ),
    (
        "half an OAuth client",
        "[mcp.a]\nurl = 'http://a/'\nauth = { client_id = 'x' }",
        3,
        "mcp.a.auth.client_secret",
        "is missing: it is required with client_id",
    ),
    (
        "a rule twice",
        SHOP + "scopes = ['a']\nadvanced.access = { required_scopes = ['b'] }",
        4,
        "openapi.shop.advanced.access",
        "cannot be used together with scopes",
    ),
    (
        "no HTTP method",
        SHOP + "include = { methods = ['GETT'] }",
        3,
        "openapi.shop.include.methods",
        'Did you mean "GET"?',
    ),
    ("an empty selection", SHOP + "exclude = {}", 3, "openapi.shop.exclude", "selects nothing"),
    (
        "no namespace",
        "[openapi.'my shop']\ndocument = 'shop.yaml'",
        1,
        'openapi."my shop"',
        "is not a namespace",
    ),
    (
        "a namespace twice",
        "[openapi.a]\ndocument = 'shop.yaml'\n[mcp.a]\nurl = 'http://a/'",
        3,
        "mcp.a",
        "same namespace as [openapi.a]",
    ),
    ("a server of no kind", "[mcp.a]\nargs = ['x']", 1, "mcp.a", "exactly one of command"),
    (
        "a server of two kinds",
        "[mcp.a]\ncommand = 'x'\nurl = 'http://a/'",
        1,
        "mcp.a",
        "exactly one of command",
    ),
    (
        "a command with its arguments",
        "[mcp.a]\ncommand = 'npx -y server'",
        2,
        "mcp.a.command",
        "put those in args",
    ),
    (
        "arguments for an address",
        "[mcp.a]\nurl = 'http://a/'\nargs = ['x']",
        3,
        "mcp.a.args",
        "can be used only with command",
    ),
    (
        "a transport for something else",
        "[mcp.a]\ncommand = 'x'\nadvanced.transport = 'sse'",
        3,
        "mcp.a.advanced.transport",
        "must be stdio",
    ),
    (
        "a broker of another kind",
        "[brokers.a]\nurl = 'amqp://x'",
        2,
        "brokers.a.url",
        "redis://host:6379",
    ),
    (
        "a password in an address",
        "[brokers.a]\nurl = 'redis://u:CANARY@x'",
        2,
        "brokers.a.url",
        "contains a password",
    ),
    (
        "a password in the second address of a list",
        "[brokers.a]\nurl = 'nats://x:1,nats://u:CANARY@y'",
        2,
        "brokers.a.url",
        "contains a password",
    ),
    (
        "what waits on Redis",
        "[brokers.a]\nurl = 'redis://x'\nqueue = 'jetstream'",
        3,
        "brokers.a.queue",
        "only with NATS",
    ),
    (
        "a client of two words",
        "[brokers.a]\nurl = 'nats://x'\nclient = 'a.b'",
        3,
        "brokers.a.client",
        "one word",
    ),
    (
        "a rule for approvals whose schema is none",
        "[tools.'a.b']\napprove = { when = { type = 'objct' } }",
        2,
        'tools."a.b".approve.when',
        "is not a JSON Schema: /type",
    ),
    (
        "a namespace of workers that is none",
        "[brokers.a]\nurl = 'nats://x'\nnamespace = 'a.b'",
        3,
        "brokers.a.namespace",
        "is not a namespace",
    ),
    (
        "a namespace of workers that is taken",
        "[mcp.b]\ncommand = 'x'\n[brokers.a]\nurl = 'nats://x'\nnamespace = 'b'",
        5,
        "brokers.a.namespace",
        "already in use: b",
    ),
    (
        "a key that is none",
        "[access.keys.a]\nscopes = ['x']",
        1,
        "access.keys.a",
        "exactly one of key and sha256",
    ),
    (
        "a digest that is none",
        "[access.keys.a]\nsha256 = 'CANARY'",
        2,
        "access.keys.a.sha256",
        "64 hexadecimal digits",
    ),
    (
        "a resource without a type",
        "[access.keys.a]\nkey = { env = 'A' }\nresources = { x = ['read'] }",
        3,
        "access.keys.a.resources.x",
        '"type:id"',
    ),
    (
        "an issuer without an address of the hub",
        "[access]\nauthorization_servers = ['https://id']",
        2,
        "access.authorization_servers",
        "needs serve.public_url",
    ),
    (
        "a JWT signed by nobody",
        JWT + "\nadvanced.algorithms = ['none']",
        5,
        "access.jwt.advanced.algorithms",
        "anyone can make such a token",
    ),
    (
        "a JWT key of another kind",
        JWT + "\nadvanced.algorithms = ['RS256']",
        5,
        "access.jwt.advanced.algorithms",
        "do not fit the key",
    ),
    (
        "a JWT with two keys",
        JWT + "\njwks_url = 'https://a/'",
        1,
        "access.jwt",
        "exactly one of jwks_url, public_key and secret",
    ),
    (
        "a JWT address that is none",
        "[access.jwt]\nissuer = 'a'\naudience = 'b'\njwks_url = 'a'",
        4,
        "access.jwt.jwks_url",
        "http:// or https://",
    ),
    (
        "a prefix with a query",
        "[serve]\nroot_path = '/a?b'",
        2,
        "serve.root_path",
        "must match",
    ),
    (
        "a secret without a source",
        "[mcp.a]\nurl = 'https://a.example'\nheaders = { X = {} }",
        3,
        "mcp.a.headers.X",
        "needs exactly one of env and file",
    ),
    (
        "a broker address that cannot be split",
        "[brokers.a]\nurl = 'redis://[::1'",
        2,
        "brokers.a.url",
        "must be an address such as",
    ),
    (
        "an origin that cannot be split",
        "[serve]\nallowed_origins = ['http://[']",
        2,
        "serve.allowed_origins[0]",
        "must be an origin",
    ),
    (
        "paging without an argument",
        "[openapi.a]\ndocument = 'a'\nadvanced.pagination = { list = { kind = 'cursor', next = '/next' } }",
        3,
        "openapi.a.advanced.pagination.list.argument",
        "is missing",
    ),
    (
        "a folder whose name is too long",
        f"[openapi.a]\ndocument = 'a'\nfiles_root = '{'a' * 5000}'",
        3,
        "openapi.a.files_root",
        "is not a folder",
    ),
    (
        "a folder whose name contains NUL",
        '[openapi.a]\ndocument = "a"\nfiles_root = "a\\u0000b"',
        3,
        "openapi.a.files_root",
        "contains NUL.",
    ),
    (
        "a header with a line break",
        '[mcp.a]\nurl = "https://a.example"\nheaders = { X = "a\\nb" }',
        3,
        "mcp.a.headers",
        "must not contain line breaks",
    ),
]


@pytest.mark.parametrize(
    ("text", "line", "key", "words"),
    [each[1:] for each in MISTAKES],
    ids=[each[0] for each in MISTAKES],
)
def test_a_mistake_is_reported_with_its_line_key_and_advice(
    folder: Path, text: str, line: int, key: str, words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(text, folder / "operations.toml")

    found = [issue for issue in caught.value.issues if issue.key == key]
    assert found, str(caught.value)
    assert words in found[0].message
    assert found[0].line == line
    assert "CANARY" not in str(caught.value)


def test_there_are_forty_mistakes() -> None:
    assert len(MISTAKES) >= 40


def test_all_mistakes_are_reported_in_the_order_of_the_file(folder: Path) -> None:
    text = "[serve]\nprot = 1\nport = 'x'\n[limits]\ntimeout = 'y'\n"

    with pytest.raises(ConfigError) as caught:
        parse_config(text, folder / "operations.toml")

    assert [issue.line for issue in caught.value.issues] == [2, 3, 5]


def test_issues_of_one_table_do_not_hide_those_of_others(folder: Path) -> None:
    text = (
        "[mcp.both]\ncommand = 'x'\nurl = 'http://a/'\nargs = ['y']\n[serve]\nprot = 1\nhost = '0.0.0.0'\n"
        "[mcp.other]\nurl = 'http://a/'\nargs = ['y']\nallow = 3\n[state]\nbroker = 'a'\n[brokers.a]\n"
        "[openapi.shop]\ndocument = ''\n"
    )

    with pytest.raises(ConfigError) as caught:
        parse_config(text, folder / "operations.toml")

    assert [issue.key for issue in caught.value.issues] == [
        "mcp.both", "serve.prot", "mcp.other.allow", "brokers.a.url", "openapi.shop.document",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: None, "there is no such file"),
        (lambda path: path.mkdir(), "Is a directory"),
        (lambda path: path.write_bytes(b"a = '\xff'"), "is not UTF-8"),
    ],
)
def test_an_unreadable_file_is_reported(tmp_path: Path, make: object, words: str) -> None:
    path = tmp_path / "operations.toml"
    make(path)  # type: ignore[operator]

    with pytest.raises(ConfigError, match=words):
        load_config(path)


def test_a_byte_order_mark_is_ignored(tmp_path: Path) -> None:
    path, key = tmp_path / "operations.toml", tmp_path / "key"
    path.write_bytes(b'\xef\xbb\xbf[access.keys.ann]\nkey = { file = "key" }\n')
    key.write_bytes(b"\xef\xbb\xbfthe-key-of-ann\r\n")

    file = load_config(path)

    assert [file.secret(secret) for _, secret in file.secrets()] == ["the-key-of-ann"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[mcp.h]\ncommand = "' + "x y " * 100 + '"', "operations.toml:2: mcp.h.command is one program"),
        ("[limits]\ntimeout = " + "9" * 400, "operations.toml:2: limits.timeout is out of range."),
        ('[openapi.a]\ndocument = "a"\ntimeout = ' + "9" * 400, ":3: openapi.a.timeout is out of range."),
        ('[record.trace]\nfile = "\\u0000"', "operations.toml:2: record.trace.file contains NUL."),
        ('modules = [\n"a",\n"b\\u0000"]', "operations.toml:1: modules[1] contains NUL."),
        ("[limits]\ntimeout = " + "9" * 5000, "not TOML: Exceeds the limit"),
        ("modules = " + "[" * 5000, "operations.toml: this is not TOML: "),
        ("[state]\nbroker = 2025-11-25", "operations.toml:2: state.broker is not a broker"),
        (
            '[record.ledger]\nfile = "l.{pid}"\nkey = { env = "K" }\nhead = "h"',
            ":4: record.ledger.head must contain {pid}",
        ),
    ],
)  # fmt: skip
def test_values_that_no_setting_can_hold_are_reported(
    folder: Path, text: str, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(text, folder / "operations.toml")

    assert message in str(caught.value)


def test_a_home_folder_of_an_unknown_user_is_an_ordinary_path(folder: Path) -> None:
    file = ConfigFile(path=folder / "operations.toml")

    assert file.resolve("~no-such-user/x") == folder / "~no-such-user" / "x"


def test_a_date_without_quotes_is_a_text(folder: Path) -> None:
    text = '[mcp.files]\ncommand = "x"\nadvanced.version = 2025-11-25'

    config = parse_config(text, folder / "operations.toml")

    assert config.tables("mcp")["files"].options["version"] == "2025-11-25"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"mcpServers": // a\n /* b\n */ {"a": }\n}', "mcp.json: line 3 is not JSON"),
        ('{"mcpServers": {\n\n', "mcp.json: line 1 is not JSON: Input data was truncated"),
        ('{"mcpServers": []}', "mcp.json: 'mcpServers' is not an object"),
        ("[" * 100_000, "mcp.json: the file is nested too deeply"),
        ('{"a": "\\ud800"}', "mcp.json: the file contains a lone surrogate"),
    ],
)
def test_a_malformed_mcp_json_is_an_invalid_config(folder: Path, text: str, message: str) -> None:
    (folder / "mcp.json").write_text(text)

    with pytest.raises(ConfigError) as caught:
        load_config(folder / "mcp.json")

    assert message in str(caught.value)


def test_an_mcp_json_is_a_config(folder: Path) -> None:
    file = load_config(folder / "mcp.json")

    assert file.config.mcp_json == ("mcp.json",)
    assert file.folder == folder


def test_a_secret_in_a_file_that_cannot_exist_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        ConfigFile(path=tmp_path / "operations.toml").secret(Secret(file="a\0b"))


def test_the_nearest_config_upwards_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (tmp_path / "operations.toml").touch()
    (inner / "mcp.json").touch()

    assert find_config(inner) == tmp_path / "operations.toml"
    (tmp_path / "operations.toml").unlink()
    assert find_config(inner) == inner / "mcp.json"
    monkeypatch.setenv("OPERATIONS_CONFIG", "x.toml")
    assert find_config(inner) == Path("x.toml")


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="needs an endless file")
def test_a_secret_and_a_config_are_read_up_to_a_limit() -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        ConfigFile().secret(Secret(file="/dev/zero"))
    with pytest.raises(ConfigError, match="larger than 4 MiB"):
        load_config(Path("/dev/zero"))
    with pytest.raises(OSError, match="larger than 4 MiB"):
        read_servers("/dev/zero")
    with pytest.raises(ValueError, match="envFile"):
        MCPClientConfig.from_entry({"command": "a", "envFile": "/dev/zero"})


@pytest.mark.requirement("R16")
def test_secrets_are_read_when_needed_and_shown_nowhere(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A", "CANARY")
    monkeypatch.delenv("SHOP_TOKEN", raising=False)
    file = ConfigFile(
        config=parse_config(FULL, folder / "operations.toml"), path=folder / "operations.toml"
    )

    assert file.secret(Secret(env="A")) == "CANARY"
    assert file.secret(Secret(file="key.txt")) == "k3y"
    assert "k3y" not in repr(file)
    with pytest.raises(ConfigError, match="SHOP_TOKEN, which is not set"):
        file.secret(Secret(env="SHOP_TOKEN"))
    with pytest.raises(ConfigError, match="cannot be read"):
        file.secret(Secret(file="nope.txt"))


ENTRIES: dict[Any, str] = {
    # The tables that become classes of the library, with their required keys.
    OpenAPIEntry: "[openapi.a]\ndocument = 'shop.yaml'\n",
    MCPEntry: "[mcp.a]\n",
    BrokerEntry: "[brokers.a]\n",
    KeyEntry: "[access.keys.a]\nkey = { env = 'A_SECRET' }\n",
    JWTEntry: "[access.jwt]\n",
    ServeEntry: "[serve]\n",
    WorkEntry: "[work]\n",
    LimitsEntry: "[limits]\n",
    ToolEntry: "[tools.'shop.list']\n",
    LogEntry: "[log]\n",
    TelemetryEntry: "[telemetry]\n",
    CodeEntry: "[code]\n",
}

CERTIFICATES = ("ca_file", "client_certificate", "client_key")
"""Keys that name files, which a test of their own sets."""

VALUES: dict[str, Any] = {
    # Fields that reject an arbitrary value of their type.
    "base_url": "https://a.example/v1",
    "url": "https://a.example/",
    "transport": "stdio",
    "version": "2025-11-25",
    "include": {"methods": ["GET"]},
    "exclude": {"methods": ["GET"]},
    "proxy": "http://proxy.example.com:3128",
    "files_root": ".",
    "root_path": "/hub",
    "jwks_url": "https://a.example/jwks",
    "allowed_origins": ["https://a.example"],
    "pagination": {"list": {"kind": "cursor", "argument": "after", "next": "/next"}},
    "auth": {"type": "bearer", "token": {"env": "A_SECRET"}},
    "host": "::1",
    "endpoint": "https://a.example",
    "resources": {'"task:1"': ["read"]},
    "issuer": "https://a.example",
    "max_bytes": 5_000,
    "token": {"env": "A_SECRET"},
    "token_url": "https://a.example/token",
    "public_url": "https://a.example",
}
NOT_IN_THE_FILE = {
    "HTTPServiceConfig.namespace": "the name of the table",
    "HTTPServiceConfig.transport": "an object",
    "MCPClientConfig.namespace": "the name of the table",
    "MCPClientConfig.server": "an object",
    "MCPClientConfig.elicit": "a function",
    "MCPClientConfig.sample": "a function",
    "RedisConfig.url": "a key of its own",
    "NatsConfig.url": "a key of its own",
    "NatsConfig.tls": "an object",
    "NatsConfig.options": "objects",
    "RemoteConfig.delegate": "a key of its own",
    "WorkerConfig.front": "an object",
    "WorkerConfig.resolve": "a function",
    "WorkerConfig.address": "of each connection",
    "WorkerConfig.limits": "the table [limits]",
    "Identity.id": "the name of the table",
    "Identity.acting": "of a token",
    "Identity.grant": "of a token",
    "Identity.issuer": "of a token",
    "Identity.expires_at": "of a token",
    "JWTConfig.jwks": "an object",
    "JWTConfig.identity": "a function",
    "ServerConfig.identity": "a function",
    "ServerConfig.anonymous": "access.anonymous",
    "ServerConfig.authorization_servers": "access.authorization_servers",
    "ServerConfig.limits": "the table [limits]",
    "ServerConfig.timeout": "limits.timeout",
    "ServerConfig.resolve": "a function",
    "ServerConfig.graph": "an object",
    "ServerConfig.ready": "a function",
    "ServerConfig.resources": "objects",
    "MCPServerSettings.identify": "a function",
}


def sample(annotation: Any, name: str, is_secret: bool) -> Any:
    """A value for a key as the file has it."""
    if name in VALUES:
        return VALUES[name]
    options = [each for each, _ in _options(annotation)]
    classes = [
        each
        for each in options
        if dataclasses.is_dataclass(each) or hasattr(each, "__struct_fields__")
    ]
    if classes:
        return needed(classes[0])
    for option in options:
        origin, arguments = get_origin(option), get_args(option)
        if option is str:
            return {"env": "A_SECRET"} if is_secret else "text"
        if option in (bool, int, float):
            return {bool: True, int: 7, float: 2.5}[option]
        if origin is Literal:
            return arguments[-1]
        if origin in (Mapping, dict) and arguments[1] is not Any:
            return {"X-Any": sample(arguments[1], "", is_secret)}
        if origin in (Collection, Sequence, tuple):
            return [sample(arguments[0], "", is_secret)]
    raise AssertionError(f"no sample for {name}: {annotation}")


def needed(cls: Any) -> dict[str, Any]:
    return {
        name: sample(key.annotation, name, key.is_secret)
        for name, key in keys_of(cls).items()
        if key.default is MISSING
    }


def settable() -> Iterator[tuple[Any, Any, str]]:
    for entry in ENTRIES:
        for cls in entry.derived.load():
            for name, key in keys_of(cls).items():
                if name not in {*entry.derived.without, *CERTIFICATES} and key.type is not None:
                    yield entry, cls, name


def test_every_table_is_tried() -> None:
    """A table that is added to the config is also added to these tests."""
    assert {
        each.__name__
        for each in (*Entry.__subclasses__(), *SourceEntry.__subclasses__())
        if each.__name__ != "SourceEntry"
    } == {e.__name__ for e in ENTRIES}


def nested(classes: set[Any]) -> set[Any]:
    """Return the classes of the tables inside the tables of these classes."""
    waiting: list[Any] = [
        key.annotation for cls in classes for key in keys_of(cls).values() if key.type
    ]
    found: set[Any] = set()
    while waiting:
        annotation: Any = waiting.pop()
        inner: Any = annotation if dataclasses.is_dataclass(annotation) else None
        if inner is None:
            waiting += get_args(annotation)
        elif inner not in found | classes:
            found.add(inner)
            waiting += [key.annotation for key in keys_of(inner).values() if key.type]
    return found


def test_fields_that_a_file_cannot_set_are_listed() -> None:
    """A field that is added to a config class is a key of the file, unless it is added to this list, too."""
    found = {
        f"{cls.__name__}.{name}": entry.derived.without.get(name)
        for entry in ENTRIES
        for cls in entry.derived.load()
        for name, key in keys_of(cls).items()
        if key.type is None or name in entry.derived.without
    }
    found |= {
        f"{cls.__name__}.{name}": None
        for cls in nested({cls for entry in ENTRIES for cls in entry.derived.load()})
        for name, key in keys_of(cls).items()
        if key.type is None
    }

    assert found.keys() == NOT_IN_THE_FILE.keys()
    assert all(reason in (None, NOT_IN_THE_FILE[name]) for name, reason in found.items())


def placed_keys(cls: Any, table: dict[str, Any]) -> dict[str, Any]:
    """Return a table as it is in a file, with its advanced keys below `advanced`."""
    rare = advanced_keys(cls)
    return {f"{ADVANCED}.{key}" if key in rare else key: value for key, value in table.items()}


def built(entry: Any, table: dict[str, Any], folder: Path, cls: Any = None) -> Any:
    """Return the object that the library builds from a table, written as TOML."""
    lines = "".join(f"{key} = {toml(value)}\n" for key, value in placed_keys(entry, table).items())
    path = folder / "operations.toml"
    file = ConfigFile(config=parse_config(ENTRIES[entry] + lines, path), path=path)
    if entry is OpenAPIEntry:
        return service_config("a", file.config.tables("openapi")["a"], HubPlace(file))
    if entry is MCPEntry:
        return client_config("a", file.config.tables("mcp")["a"], HubPlace(file))
    found = next(each for _, each in entries_of(file.config) if type(each) is entry)
    named = {"id": "a"} if entry is KeyEntry else {}
    return cls(**file.options(cls, found), **named)


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {toml(each)}" for key, each in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value)


@pytest.mark.parametrize(
    ("entry", "cls", "name"), list(settable()), ids=lambda each: getattr(each, "__name__", each)
)
def test_every_field_of_a_config_class_can_be_set_from_the_file(
    entry: Any, cls: Any, name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_SECRET", "sesame")
    key = entry.derived.keys()[name]
    value = sample(key.annotation, name, key.is_secret)
    needs: dict[str, Any] = {}
    if entry is MCPEntry:
        needs = {"url": VALUES["url"]} if name in ("auth", "headers") else {"command": "server"}
        value = {"env": "A_SECRET"} if name == "auth" else value
        needs = {} if name == "url" else needs
    elif entry is BrokerEntry:
        needs = {"url": "nats://127.0.0.1" if cls.__name__ == "NatsConfig" else "redis://127.0.0.1"}
        value = ["a.b"] if name == "exclude" else value
    elif entry is JWTEntry:
        needs = {"issuer": "a", "audience": "b"}
        if name not in ("jwks_url", "public_key", "secret"):
            needs["jwks_url"] = VALUES["jwks_url"]
        value = ["RS256"] if name == "algorithms" else value
    elif entry is ToolEntry:
        value = {"rename": "store.all", "select": ["/items"]}.get(name, value)
    elif name == "certificate_key":
        needs = {"certificate": "certificate.pem"}
    if isinstance(key.default, bool):
        value = not key.default

    config = built(entry, {**needs, name: value}, folder, cls)

    found = getattr(config, name)
    assert found != key.default
    if key.is_secret and not key.may_be_written:
        assert "sesame" in str(msgspec.to_builtins(found))
    elif not isinstance(value, dict | list | str):
        assert found == value


@pytest.mark.parametrize(
    "cls",
    [
        HTTPAuth,
        BasicCredential,
        ClientCredentials,
        PasswordCredentials,
        RefreshToken,
        TokenExchange,
    ],
    ids=lambda cls: cls.__name__,
)
def test_every_field_of_a_credential_can_be_set_from_the_file(
    cls: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_SECRET", "sesame")
    keys = keys_of(cls)
    table = {name: sample(key.annotation, name, key.is_secret) for name, key in keys.items()}

    if cls is HTTPAuth:
        found = built(OpenAPIEntry, {"auth": table}, folder).auth
    elif cls is TokenExchange:
        found = built(
            MCPEntry, {"url": VALUES["url"], "auth": {"exchange": table}}, folder
        ).auth.exchange
    else:
        found = built(OpenAPIEntry, {"credentials": {"login": table}}, folder).credentials["login"]

    assert type(found) is cls
    for name, key in keys.items():
        assert getattr(found, name) != key.default or name == "type"


@pytest.mark.parametrize("name", keys_of(MCPServerSettings))
def test_every_setting_of_the_mcp_server_can_be_set_from_the_file(name: str, folder: Path) -> None:
    key = keys_of(MCPServerSettings)[name]
    if key.type is None:
        assert name == "identify"
        return
    is_flag = isinstance(key.default, bool)
    value = not key.default if is_flag else sample(key.annotation, name, key.is_secret)

    table = placed_keys(MCPServerSettings, {name: value})
    config = built(ServeEntry, {"mcp": table}, folder, ServerConfig)

    found = getattr(config.mcp, name)
    assert (list(found) if isinstance(found, tuple) else found) == value != key.default


def test_the_other_nested_tables_become_their_classes(folder: Path) -> None:
    table = {
        "access": {"required_scopes": ["a"], "resource_type": "task", "resource_action": "read"},
        "pagination": {
            "one": {"kind": "page", "first": 0},
            "two": {"kind": "offset", "limit": "size"},
            "three": {"kind": "link"},
            "four": {"kind": "url", "next": "/next"},
        },
        "document_root": "docs",
    }

    config = built(OpenAPIEntry, table, folder)

    assert config.access == AccessControl(["a"], None, "task", "read")
    assert config.pagination == {
        "one": PagePaging(first=0),
        "two": OffsetPaging(limit="size"),
        "three": LinkPaging(),
        "four": URLPaging(next="/next"),
    }
    assert config.document_root == folder / "docs"
    assert config.namespace == "a"


def test_a_rule_for_approvals_has_a_schema(folder: Path) -> None:
    when = {"properties": {"amount": {"minimum": 10, "enum": [10, {"any": [1]}]}}}

    config = built(ToolEntry, {"approve": {"when": when, "hold": 2}}, folder, ToolConfig)

    assert config.approve == ApprovalRule(when=when, hold=2)


def test_certificate_paths_are_relative_to_the_file_and_errors_affect_only_their_source(
    folder: Path,
) -> None:
    text = "[openapi.a]\ndocument = 'shop.yaml'\nadvanced.ca_file = 'ca.pem'\n"
    path = folder / "operations.toml"
    file = ConfigFile(config=parse_config(text, path), path=path)

    with pytest.raises(ValueError, match=re.escape(str(folder / "ca.pem"))):
        service_config("a", file.config.tables("openapi")["a"], HubPlace(file))

    for key in CERTIFICATES:
        assert keys_of(HTTPServiceConfig)[key].type == str | None


def test_a_proxy_with_a_login_must_be_a_secret(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_SECRET", "http://u:sesame@proxy.example.com:3128")

    config = built(OpenAPIEntry, {"proxy": {"env": "A_SECRET"}}, folder)

    assert config.proxy == "http://u:sesame@proxy.example.com:3128"
    with pytest.raises(ConfigError, match="contains a login: write the whole address as") as caught:
        built(OpenAPIEntry, {"proxy": "http://u:sesame@proxy.example.com:3128"}, folder)
    assert "sesame" not in str(caught.value)


def test_a_file_without_apis_and_servers_does_not_import_them(tmp_path: Path) -> None:
    path = tmp_path / "operations.toml"
    path.write_text("[limits]\nburst = 7\n[mcp.a]\ncommand = 'x'\n")
    code = (
        f"import sys; from pathlib import Path; from operations.config import load_config; "
        f"load_config(Path({str(path)!r})); print({{'operations.openapi.source', 'mcp', 'aiohttp'}} & set(sys.modules))"
    )

    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=scaled(60)
    )

    assert done.stdout == "set()\n"


def test_keys_have_their_line_numbers_in_every_toml_syntax() -> None:
    text = (
        'top = 1\n# [not.a.table]\n[a."b.c"]\nx = """\n[no]\ny = 1\n"""\nz = [\n  1, # ]\n]\nq.r = 2\n'
        "[[list]]\nk = 1\n[[list]]\nk = { inner = 2 }\n[list.sub]\nm = 1\n"
    )
    places = KeyLines(text)

    assert places.line(("top",)) == 1
    assert places.line(("a", "b.c")) == 3
    assert places.line(("a", "b.c", "z", 0)) == 8
    assert places.line(("a", "b.c", "q", "r")) == 11
    assert places.line(("list", 0, "k")) == 13
    assert places.line(("list", 1, "k", "inner")) == 15
    assert places.line(("list", 1, "sub", "m")) == 17
    assert places.line(("no",)) is None


@pytest.mark.parametrize(
    ("entry", "section"),
    [
        (OpenAPIEntry, "`[openapi.NAME]`"),
        (MCPEntry, "`[mcp.NAME]`"),
        (BrokerEntry, "`[brokers.NAME]`"),
        (ToolEntry, '`[tools."PATTERN"]`'),
        (KeyEntry, "`[access]`"),
        (JWTEntry, "`[access]`"),
        (ServeEntry, "`[serve]`"),
        (MCPServerSettings, "`[serve]`"),
        (CodeEntry, "`[code]`"),
        (WorkEntry, "`[work]`"),
        (RunsEntry, "`[runs]`"),
        (ScheduleEntry, "`[runs]`"),
        (LimitsEntry, "`[limits]`"),
        (LogEntry, "`[log]`"),
        (LedgerEntry, "`[record.NAME]`"),
        (AuditConfig, "`[record.NAME]`"),
        (TraceEntry, "`[record.NAME]`"),
        (TelemetryEntry, "`[log]`"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_every_key_is_documented_in_the_section_of_its_table(entry: Any, section: str) -> None:
    page = (PROJECT / "docs" / "config.md").read_text(encoding="utf-8")
    text = page.partition(f"### {section}")[2].partition("\n### ")[0]

    fields = msgspec.structs.fields(file_class(entry))
    names = [each.encode_name for each in fields if each.name != ADVANCED]
    rare = [f"{ADVANCED}.{name}" for name in advanced_keys(entry)]
    names += rare

    assert names
    assert [name for name in names if not re.search(rf"`(\w+\.)*{name}`", text)] == []


def test_every_key_of_the_file_itself_is_documented() -> None:
    page = (PROJECT / "docs" / "config.md").read_text(encoding="utf-8")

    names = [each.name for each in dataclasses.fields(Config)]

    assert [name for name in names if not re.search(rf"[`\[]{name}\b", page)] == []


def test_a_program_with_a_space_in_its_path_is_beside_the_file(tmp_path: Path) -> None:
    (tmp_path / "my tool").touch()
    path = tmp_path / "operations.toml"
    path.write_text('[mcp.a]\ncommand = "./my tool"\n')

    assert load_config(path).config.tables("mcp")["a"].options == {"command": "./my tool"}


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"auth": {}}, "auth.type is missing."),
        ({"auth": {"type": "bearer"}}, "auth: bearer needs a token"),
        ({"credentials": {"key": {}}}, "credentials.key needs exactly one of: token; "),
        ({"tiemout": 5}, "config: there is no field 'tiemout'."),
        ({"timeout": [1]}, "timeout may not be a list."),
        ({"pagination": {"list": {"kind": "links"}}}, "pagination.list.kind must be one of link, "),
        ({"pagination": {"list": {}}}, "pagination.list.kind must be one of link, "),
    ],
)
def test_an_error_in_a_mapping_names_its_key(entry: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        HTTPServiceConfig.from_entry({"namespace": "shop", **entry})


def test_the_keys_of_a_store_may_be_a_list(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OLD", "NEW"):
        monkeypatch.setenv(name, name * 16)
    path = folder / "operations.toml"
    path.write_text(
        '[state]\nurl = "sqlite:state.db"\nkey = [{ env = "NEW" }, { env = "OLD" }]\n'
        '[runs]\nkey = { env = "OLD" }\n'
    )
    file = load_config(path)

    assert [secret.env for _, secret in file.secrets()] == ["NEW", "OLD", "OLD"]


def test_a_key_that_is_written_into_a_list_is_rejected(folder: Path) -> None:
    path = folder / "operations.toml"
    path.write_text('[state]\nkey = ["a secret"]\n')

    with pytest.raises(ConfigError) as caught:
        load_config(path)

    assert "state.key" in str(caught.value)
    assert "a secret" not in str(caught.value)
