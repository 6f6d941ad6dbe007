"""`operations dev --lan`: a phone signs in with a code, and everything else stays as it is."""

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.cli.test_dev import APP, get, read_until, started

from operations import Identity
from operations.cli.qr import qr_lines
from operations.front.credentials import CredentialError
from operations.io.hosts import own_address
from operations.server.signin.codes import OneTimeCodes

NETWORK = "127.0.0.2"
"""An address of this machine that stands for the one in its network."""

LAN = ("-m", "operations", "dev", "app.py", "--port", "0", "--lan", "--host", NETWORK)


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "app.py").write_text(APP)
    return tmp_path


async def status(
    url: str, method: str = "GET", *, token: str | None = None, cookie: str | None = None
) -> int:
    headers = {} if token is None else {"authorization": f"Bearer {token}"}
    headers |= {} if cookie is None else {"cookie": cookie}
    async with (
        aiohttp.ClientSession(headers=headers, cookie_jar=aiohttp.DummyCookieJar()) as session,
        session.request(method, url) as answer,
    ):
        return answer.status


async def sign_in(url: str, code: str) -> str:
    """Return the cookie of a new session."""
    headers = {"authorization": f"Bearer {code}"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(f"{url}/session") as answer,
    ):
        assert answer.status == 200
        assert (await answer.json())["identity"]["id"] == "guest"
        return answer.headers["set-cookie"].partition(";")[0]


async def test_another_device_signs_in_once_with_a_code(here: Path) -> None:
    async with started(here, *LAN, stdin=subprocess.PIPE) as process:
        printed = await read_until(process, "Ctrl-C")
        own = printed.split()[4]
        [network] = re.findall(rf"http://{NETWORK}:\d+", printed)
        [code] = re.findall(r"sign in with (\S+) ", printed)
        question = "/math/double?number=4"

        # This machine is served as without the option.
        assert await get(own + question) == 8
        assert await status(network + "/operations") == 401
        assert await status(network + question) == 401
        assert await status(network + "/mcp", "POST") == 401
        # The page that asks for the code.
        assert await status(network + "/") == 200

        # A code is no credential for calls.
        assert await status(network + question, token=code) == 401
        assert await status(own + "/session", "POST", token=code) != 200
        assert await status(network + "/session", "POST", token="AAAA-AAAA") == 401
        cookie = await sign_in(network, code.lower())
        assert "signed in" in await read_until(process, "signed in")
        assert await status(network + question, cookie=cookie) == 200
        assert await status(network + "/session", "POST", token=code) == 401

        assert process.stdin is not None
        process.stdin.write(b"\n")
        [other] = re.findall(r"sign in with (\S+) ", await read_until(process, "sign in with"))
        assert other != code
        assert await sign_in(network, other) != cookie
        assert await status(network + question, cookie=cookie) == 200

        # A change of the config does not open the network.
        (here / "operations.toml").write_text("[limits]\ntimeout = 7\n")
        await read_until(process, "reloaded")
        assert await status(network + question) == 401
        assert await status(network + question, cookie=cookie) == 200


async def test_programs_read_the_code_as_json(here: Path) -> None:
    async with started(here, *LAN, "--json") as process:
        found = json.loads((await read_until(process, "seconds")).splitlines()[-1])
        assert found["seconds"] == 120
        await sign_in(found["network"], found["code"])


async def test_an_address_for_the_network_is_only_for_lan(here: Path) -> None:
    ran = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "operations", "dev", "app.py", "--host", NETWORK,
        cwd=here, stderr=subprocess.PIPE,
    )  # fmt: skip
    _, message = await ran.communicate()
    assert ran.returncode == 1
    assert "--lan" in message.decode()


# ------------------------------------------------------------ codes


class Asked:
    """A request with a token."""

    def __init__(self, token: str, method: str = "POST") -> None:
        headers = [(b"authorization", f"Bearer {token}".encode())]
        self.scope: dict[str, Any] = {"method": method, "path": "/session", "headers": headers}


def test_a_code_ends_after_two_minutes() -> None:
    now = 0.0
    codes = OneTimeCodes(Identity("guest"), clock=lambda: now)
    first, late = codes.new(), codes.new()
    assert re.fullmatch(r"[A-Z2-9]{4}-[A-Z2-9]{4}", first)
    with pytest.raises(CredentialError):
        codes(Asked(first))  # type: ignore[arg-type]
    now = 119.9
    begun = Asked(late)
    assert codes(begun) == Identity("guest")  # type: ignore[arg-type]
    # The session that it began checks the same request again.
    now = 10_000.0
    assert codes(begun) == Identity("guest")  # type: ignore[arg-type]
    ended = codes.new()
    now += 120
    with pytest.raises(CredentialError, match="code"):
        codes(Asked(ended))  # type: ignore[arg-type]


def test_a_wrong_code_may_have_any_characters() -> None:
    codes = OneTimeCodes(Identity("guest"))
    for token in ("", "é", "x" * 10_000, codes.new() + "A"):
        with pytest.raises(CredentialError):
            codes(Asked(token or "-"))  # type: ignore[arg-type]


def test_the_address_in_the_network_is_no_loopback_address() -> None:
    assert own_address() is None or not str(own_address()).startswith("127.")


# ------------------------------------------------------------ QR codes


def test_a_qr_code_is_what_readers_of_qr_codes_read() -> None:
    # zxing-cpp reads this picture as the address.
    assert "\n".join(qr_lines("http://192.168.1.20:8000/#code=ABCD-EFGH")) == QR.strip("\n")


def test_a_text_that_is_too_long_for_a_qr_code_is_rejected() -> None:
    with pytest.raises(ValueError, match="107 bytes"):
        qr_lines("x" * 107)


QR = """
█████████████████████████████████
██ ▄▄▄▄▄ █ ▀▀▄ ▄ ▄▀▄██▄█ ▄▄▄▄▄ ██
██ █   █ ███ ▄▄▄▀ █ ▄▄ █ █   █ ██
██ █▄▄▄█ █ ▄▄ █  █▄▄██▄█ █▄▄▄█ ██
██▄▄▄▄▄▄▄█ █ ▀ █▄█ █▄█▄█▄▄▄▄▄▄▄██
██▄  █▀ ▄▀   ██▄█▄ ▀▄▀█  ▄▄██  ██
███ ▀▄ ▀▄▄ ▀█▄██▀ ██▀ ▄█ █▄▄▄█▄██
██  ▀▀█▀▄▀▀ █▄  █▄ █▄▀█  ███▀▀ ██
██▀ ▄██ ▄  █ ▀ ▄▄ ▄█ ▄▄▄█ ▀▄██▄██
███▄▄█▀▄▄ ▀ ▄██ ▄▄ ██ █▄ ▄█ ▀▀ ██
██▄▄██▀ ▄ ▄▀█▄█▀█▄██  ▄█▀▄████▄██
██▄▄▄▄▄█▄▄ ▄▄▄ ▄█▄ ▀█  ▄▄▄  ▀▄▀██
██ ▄▄▄▄▄ █▀▄▄▀ ▄ ▄▀█▀█ █▄█ ███▄██
██ █   █ ██  ██  ▀███▄ ▄▄  ██▄▀██
██ █▄▄▄█ █   ▄█▀█▄▀▄██▀██ ▄█▄▄▄██
██▄▄▄▄▄▄▄█▄██▄▄▄█▄▄██▄▄█▄▄████▄██
█████████████████████████████████
"""
