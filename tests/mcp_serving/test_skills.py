"""Skills (`io.modelcontextprotocol/skills`): those of a folder, and those of an imported server."""

import re
from base64 import b64encode
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest
import yaml
from pydantic import AnyUrl
from tests.mcp_serving.support import serving
from tests.mcp_serving.test_tasks import Client

from operations import CallError, OperationRegistry
from operations.mcp import MCPClientConfig, connect_mcp, to_mcp
from operations.mcp.shared.skills import digest_of, fault_of, front_matter

SKILLS = "io.modelcontextprotocol/skills"
MANIFEST = """---
name: pdf-forms
description: Fill the forms of PDF files.
metadata:
  operations: form.*
---

Read references/FORMS.md first.
"""
URI = "skill://pdf-forms/SKILL.md"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with one skill."""
    skill = tmp_path / "skills" / "pdf-forms"
    (skill / "references").mkdir(parents=True)
    (skill / "SKILL.md").write_text(MANIFEST)
    (skill / "references" / "FORMS.md").write_text("Forms.\n")
    (skill / "logo.png").write_bytes(b"\x89PNG\xff")
    return tmp_path / "skills"


def example() -> OperationRegistry:
    """A registry with an operation that the skill uses, one that needs a scope, and another one."""
    registry = OperationRegistry()

    @registry.operation("form.fill")
    async def fill(name: str) -> str:
        return name

    @registry.operation("form.secret", scopes=["forms"])
    async def secret() -> str:
        return ""

    @registry.operation("other.tool")
    async def other() -> str:
        return ""

    return registry


@asynccontextmanager
async def served(registry: OperationRegistry, **options: Any) -> AsyncGenerator[tuple[Client, str]]:
    """Serve a registry; yield a client and the address."""
    app = to_mcp(registry, **options).asgi_app()
    async with serving(app) as address, aiohttp.ClientSession() as http:
        yield Client(http, address), f"{address}/mcp"


async def read(client: Client, uri: str) -> Any:
    """Return the response to `resources/read`."""
    named = uri if uri.isascii() else f"=?base64?{b64encode(uri.encode()).decode()}?="
    return await client.post("resources/read", {"uri": uri}, {}, named=named)


async def test_a_folder_of_skills_is_served(folder: Path) -> None:
    async with served(example(), skills=[str(folder)]) as (client, _):
        offered = (await client.post("server/discover", {}, {}))["result"]["capabilities"]
        listed = (await client.post("skills/list", {}, {}))["result"]
        one = (await client.post("skills/get", {"uri": URI}, {}))["result"]["skill"]
        unknown = await client.post("skills/get", {"uri": "skill://other/SKILL.md"}, {})
        resources = (await client.post("resources/list", {}, {}))["result"]["resources"]
        (entry,) = listed["skills"]
        for each in entry["resources"]:
            (content,) = (await read(client, each["uri"]))["result"]["contents"]
            if "text" in content:
                data = content["text"].encode()
                assert each["digest"] == f"sha256:{sha256(data).hexdigest()}"
                assert each["size"] == len(data)

    assert offered["extensions"][SKILLS] == {"directoryRead": True}
    assert one == entry
    assert entry["frontmatter"] == yaml.safe_load(MANIFEST.split("---")[1])
    assert [each["uri"] for each in entry["resources"]] == [
        URI,
        "skill://pdf-forms/logo.png",
        "skill://pdf-forms/references/FORMS.md",
    ]
    assert {"ttlMs", "cacheScope"} <= listed.keys()
    assert unknown["error"]["code"] == -32602
    assert [(each["uri"], each["name"]) for each in resources] == [(URI, "pdf-forms")]


async def test_the_folders_of_a_skill_can_be_listed(folder: Path) -> None:
    method = "resources/directory/read"
    async with served(example(), skills=[str(folder)]) as (client, _):
        root = (await client.post(method, {"uri": "skill://pdf-forms"}, {}))["result"]["resources"]
        file = await client.post(method, {"uri": URI}, {})

    kinds = {each["name"]: each["mimeType"] for each in root}
    assert kinds == {
        "SKILL.md": "text/markdown",
        "logo.png": "image/png",
        "references": "inode/directory",
    }
    assert file["error"]["code"] == -32602


NAMES = [
    "a b.md",
    "100%.md",
    "100%25.md",
    "%2e%2e.md",
    "c#.txt",
    "why?.txt",
    "a&b=c;d,e+f@g!.md",
    "größe.md",
    "日本語/説明 書.md",
    "e\u0301.md",
    "[x]{y}|z^`'\".md",
]


@pytest.mark.requirement("R77")
async def test_names_of_files_are_encoded_in_their_addresses(folder: Path) -> None:
    """Each file is read by the address in its entry, directly and through a hub that checks its digest."""
    skill = folder / "pdf-forms"
    for number, name in enumerate(NAMES):
        (skill / name).parent.mkdir(exist_ok=True)
        (skill / name).write_text(f"content {number}")
    async with served(example(), skills=[str(folder)]) as (direct, address):
        registry = OperationRegistry()
        async with connect_mcp("up", MCPClientConfig(url=address)) as up:
            registry.register_all(up)
            async with served(registry) as (through, _):
                for client, place in ((direct, "skill://"), (through, "skill://up/")):
                    (entry,) = (await client.post("skills/list", {}, {}))["result"]["skills"]
                    base = f"{place}pdf-forms/"
                    found = {each["uri"]: each for each in entry["resources"]}
                    for number, name in enumerate(NAMES):
                        uri = base + quote(name, safe="/!$&'()*+,;=:@~")
                        (content,) = (await read(client, uri))["result"]["contents"]
                        assert content["uri"] == uri
                        assert content["text"] == f"content {number}"
                        assert found[uri]["digest"] == digest_of(content["text"].encode())
                        assert re.fullmatch(r"[A-Za-z0-9._~!$&'()*+,;=:@%/-]+", uri)
                        assert AnyUrl(uri).unicode_string() == uri
                    method = "resources/directory/read"
                    inside = {"uri": f"{base}{quote('日本語')}"}
                    (child,) = (await client.post(method, inside, {}))["result"]["resources"]
                    assert child["name"] == "説明 書.md"
                    assert child["uri"] == f"{inside['uri']}/{quote('説明 書.md')}"
                    root = await client.post(method, {"uri": base}, {})
                    names = {each["name"] for each in root["result"]["resources"]}
                    assert {"a b.md", "100%.md", "日本語", "why?.txt"} <= names


async def test_an_address_with_another_encoding_of_a_name_is_that_of_the_file(folder: Path) -> None:
    (folder / "pdf-forms" / "größe a.md").write_text("x")
    async with served(example(), skills=[str(folder)]) as (client, _):
        listed = f"skill://pdf-forms/{quote('größe a.md')}"
        for name in ("gr%c3%b6%C3%9Fe%20a%2Emd", "größe%20a.md"):
            uri = f"skill://pdf-forms/{name}"
            (content,) = (await read(client, uri))["result"]["contents"]
            assert content["text"] == "x"
            assert content["uri"] == uri
        inside = "skill://pdf-forms/references%2FFORMS.md"
        assert "error" in await read(client, inside)

    assert listed.isascii()


async def test_reading_a_skill_discloses_the_operations_that_it_uses(folder: Path) -> None:
    async with served(example(), skills=[str(folder)], disclosure="gateway") as (client, _):
        result = (await read(client, URI))["result"]
        other = (await read(client, "skill://pdf-forms/references/FORMS.md"))["result"]

    tools = result["_meta"]["alkdev.operations/tools"]
    assert [tool["name"] for tool in tools] == ["form__fill"]
    assert tools[0]["inputSchema"]["required"] == ["name"]
    assert "alkdev.operations/tools" not in other["_meta"]


async def test_a_server_without_skills_does_not_offer_them() -> None:
    async with served(example()) as (client, _):
        offered = (await client.post("server/discover", {}, {}))["result"]["capabilities"]
        refused = await client.post("skills/list", {}, {})

    assert SKILLS not in (offered.get("extensions") or {})
    assert refused["error"]["code"] == -32601


async def test_skills_pass_through_a_hub(folder: Path) -> None:
    async with served(example(), skills=[str(folder)]) as (direct, address):
        registry = OperationRegistry()
        async with (
            connect_mcp("one", MCPClientConfig(url=address)) as one,
            connect_mcp("two", MCPClientConfig(url=address)) as two,
        ):
            registry.register_all(one)
            registry.register_all(two)
            async with served(registry) as (client, _):
                (at_server,) = (await direct.post("skills/list", {}, {}))["result"]["skills"]
                listed = (await client.post("skills/list", {}, {}))["result"]["skills"]
                uri = "skill://two/pdf-forms/SKILL.md"
                got = (await client.post("skills/get", {"uri": uri}, {}))["result"]["skill"]
                (content,) = (await read(client, uri))["result"]["contents"]
                method = "resources/directory/read"
                folder_uri = {"uri": "skill://two/pdf-forms/references"}
                (child,) = (await client.post(method, folder_uri, {}))["result"]["resources"]

    assert sorted(each["uri"] for each in listed) == [
        "skill://one/pdf-forms/SKILL.md",
        "skill://two/pdf-forms/SKILL.md",
    ]
    assert got in listed
    assert got["frontmatter"] == at_server["frontmatter"]
    assert [each["digest"] for each in got["resources"]] == [
        each["digest"] for each in at_server["resources"]
    ]
    assert content == {"uri": uri, "mimeType": "text/markdown", "text": MANIFEST}
    assert child["uri"] == "skill://two/pdf-forms/references/FORMS.md"


async def test_a_file_that_is_not_what_its_skill_states_is_rejected(folder: Path) -> None:
    server = to_mcp(example(), skills=[str(folder)])
    async with (
        serving(server.asgi_app()) as address,
        connect_mcp("up", MCPClientConfig(url=f"{address}/mcp")) as client,
    ):
        registry = OperationRegistry(client)
        await registry.execute("up.skills.list")
        good = (await registry.execute("up.resources.read", {"uri": URI})).data
        (skill,) = server.service.skills._own.values()
        skill.files[URI] = MANIFEST.replace("first", "never").encode()
        with pytest.raises(CallError) as caught:
            await registry.execute("up.resources.read", {"uri": URI})

    assert good[0]["text"] == MANIFEST
    assert "of a skill that has" in caught.value.message


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (b"Read", "digest"),
        (b"more", "bytes"),
        (None, None),
    ],
)
def test_a_file_is_compared_with_its_entry(change: bytes | None, fault: str | None) -> None:
    content = MANIFEST.encode()
    entry = {
        "uri": URI,
        "frontmatter": front_matter(MANIFEST),
        "resources": [
            {
                "uri": URI,
                "digest": f"sha256:{sha256(content).hexdigest()}",
                "size": len(content),
            }
        ],
    }
    if change == b"Read":
        content = content.replace(b"Read", b"Rend")
    elif change is not None:
        content += change
    found = fault_of(content, URI, entry)

    assert (found is None) if fault is None else (found is not None and fault in found)
    assert fault_of(b"", "skill://pdf-forms/other", entry) == "is not a file of its skill"
    entry["resources"] = "dynamic"
    entry["frontmatter"] = {"name": "other"}
    assert (
        fault_of(MANIFEST.encode(), URI, entry) == "has another front matter than its skill states"
    )


@pytest.mark.parametrize(
    "text",
    [
        "name: a\ndescription: b c   # comment",
        "name: a\nversion: 1.0\ncount: 3\nok: true\nnone: ~\nempty:",
        "name: 'it''s'\nother: \"a: b # c\" # comment",
        "list:\n  - a\n  - b: 1\n    c: 2\n  -  d",
        "flow: [a, b]\nnumbers: [1, 2.5]",
        "a:\n  b:\n    c: d\n  e: f\ng: h",
        "text: |\n  one\n    two\n\n  three\nnext: x",
        "text: >-\n  one\n  two\n\n  three\nnext: x",
        "plain: one\n  two\n  three\nurl: https://example.com/a#b",
        "allowed-tools: Bash(git:*) Read",
    ],
)
def test_front_matter_is_read_as_yaml(text: str) -> None:
    assert front_matter(f"---\n{text}\n---\nBody\n") == yaml.safe_load(text)


@pytest.mark.parametrize("text", ["a: &anchor b", "a: !tag b", "just text", "a: *alias"])
def test_other_yaml_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        front_matter(f"---\n{text}\n---\n")


@pytest.mark.requirement("R67")
@pytest.mark.parametrize(
    "text",
    [
        f"a{' ' * 30_000}b",
        f"a: b\n{' c' * 4_000}",
        "\n".join(f"{' ' * depth}a:" for depth in range(240))
        + "\n"
        + " " * 240
        + "a: "
        + "[" * 900,
        "a: " + "[" * 30_000,
        "a" * 1_000_000,
        f"a{' ' * 1_000_000}b",
    ],
)
def test_front_matter_of_hostile_servers_is_rejected_or_read_in_one_pass(text: str) -> None:
    """A time that grows with the square of the length would exceed the limit of the test by far."""
    entry = {"uri": URI, "frontmatter": {}, "resources": "dynamic"}
    fault = fault_of(f"---\n{text}\n---\n".encode(), URI, entry)

    assert fault in (None, "has another front matter than its skill states")


@pytest.mark.parametrize(
    ("name", "manifest"),
    [
        ("pdf", "no front matter"),
        ("pdf", "---\nname: other\ndescription: d\n---\n"),
        ("Pdf", "---\nname: Pdf\ndescription: d\n---\n"),
        ("pdf", "---\nname: pdf\n---\n"),
    ],
)
def test_a_skill_that_breaks_the_rules_is_reported(
    tmp_path: Path, name: str, manifest: str
) -> None:
    (tmp_path / name).mkdir()
    (tmp_path / name / "SKILL.md").write_text(manifest)
    with pytest.raises(ValueError, match=r"SKILL\.md"):
        to_mcp(OperationRegistry(), skills=[str(tmp_path)])
