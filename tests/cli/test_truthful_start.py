"""What commands say about a config whose parts are missing: the place, the key, and what to do."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import Ran

from operations.cli import doctor
from operations.cli.options import ExitCode
from operations.hub import open_hub

Run = Callable[..., Ran]

SHOP = """[openapi.shop]
document = "shop.json"
base_url = "http://127.0.0.1:9"
[openapi.shop.auth]
type = "bearer"
"""
DOCUMENT = '{"openapi": "3.1.0", "paths": {"/a": {"get": {"operationId": "a", "responses": {}}}}}'


def configure(folder: Path, text: str) -> None:
    (folder / "shop.json").write_text(DOCUMENT)
    (folder / "operations.toml").write_text(text)


@pytest.mark.parametrize(
    ("command", "text", "words"),
    [
        (
            ["list"],
            SHOP + 'token = { env = "NOT_SET" }\n',
            "operations.toml:6: openapi.shop.auth.token needs the environment variable NOT_SET, which is not set.",
        ),
        (
            ["list"],
            '[mcp.tools]\ncommand = "true"\nenv.KEY = { file = "key.txt" }\n',
            "operations.toml:3: mcp.tools.env.KEY needs the secret in {folder}/key.txt, which cannot be read.",
        ),
        (
            ["serve", "--port", "0"],
            '[access.keys.ann]\nkey = { env = "NOT_SET" }\n',
            "operations.toml:2: access.keys.ann.key needs the environment variable NOT_SET, which is not set.",
        ),
        (
            ["serve", "--port", "0"],
            '[serve]\ncertificate = "no.pem"\ncertificate_key = "no.key"\n',
            "operations.toml:2: serve.certificate names no file: there is no {folder}/no.pem.",
        ),
        (
            ["doctor"],
            '[access.keys.ann]\nkey = { env = "NOT_SET" }\n',
            "needs the environment variable NOT_SET, which is not set. See operations.toml:2.",
        ),
        (
            ["doctor"],
            '[serve]\npublic_url = "https://hub.example"\n',
            "offers no sign-in without [access.jwt]",
        ),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_what_is_missing_is_named_with_its_key_and_line(
    folder: Path, run: Run, command: list[str], text: str, words: str
) -> None:
    configure(folder, text)

    ran = run(*command)

    assert words.format(folder=folder) in " ".join((ran.out + ran.err).split())


@pytest.mark.parametrize("module", ["opz.py", "no.such.package"])
def test_a_wrong_module_name_fails_the_list(folder: Path, run: Run, module: str) -> None:
    configure(folder, f"modules = ['ops.py', '{module}']\n")

    ran = run("list")

    assert ran.code == ExitCode.CONFIG
    assert f"operations.toml:1: modules[1] is wrong: {module} is neither" in ran.err
    assert "work.add" in ran.out


def test_operations_of_setup_are_listed_with_their_source(folder: Path, run: Run) -> None:
    (folder / "start.py").write_text(
        "def setup(hub):\n"
        "    @hub.registry.operation('clock.now', type='query')\n"
        "    async def now() -> int:\n"
        "        return 1\n"
    )
    configure(folder, "setup = 'start:setup'\n")

    assert run("list").out == "clock.now\tquery\tsetup\t\n"
    findings = json.loads(run("doctor", "--json").out)["findings"]
    assert {"what": "setup", "state": "ok", "words": "1 operation"} in findings
    assert "sources" not in [each["what"] for each in findings]


def test_doctor_waits_for_slow_sources_and_names_their_limit(
    folder: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    configure(
        folder,
        "[mcp.slow]\ncommand = 'sleep'\nargs = ['600']\n"
        "advanced.connect_timeout = 0.2\nadvanced.shutdown_timeout = 0.1\n",
    )
    waits: list[float | None] = []

    def opened(*arguments: Any, wait: float | None = 30) -> Any:
        waits.append(wait)
        return open_hub(*arguments, wait=wait)

    monkeypatch.setattr(doctor, "open_hub", opened)
    ran = run("doctor")

    assert waits == [None], "a source is as slow as its own connect_timeout allows"
    assert "connect_timeout" in ran.out
    assert "still connecting" not in ran.out
