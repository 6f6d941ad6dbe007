"""What the console is made of, and what the browser is told about it."""

import re
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from operations.server.console import ASSETS, CONTENT_SECURITY_POLICY, console_app

STATIC = Path(__file__).resolve().parent.parent.parent / "src/operations/server/console/static"
FILES = sorted(STATIC.iterdir())
SCRIPTS = [file for file in FILES if file.suffix == ".js"]

# Every way from a string to markup, code, or somebody else's server.
FORBIDDEN = re.compile(
    r"\.(inner|outer)HTML\b|insertAdjacentHTML|document\.write|setHTML|DOMParser|createContextualFragment"
    r"|\beval\(|new Function|srcdoc|javascript:|import\(|https?://(?!www\.w3\.org/2000/svg)"
)


def client() -> TestClient:
    return TestClient(console_app(), base_url="http://127.0.0.1")


@pytest.mark.requirement("R16")
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_no_file_turns_text_into_markup_or_leaves_the_server(file: Path) -> None:
    assert FORBIDDEN.findall(file.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("file", SCRIPTS, ids=lambda file: file.name)
def test_only_the_choice_of_colours_is_stored(file: Path) -> None:
    stores = re.compile(r"localStorage|sessionStorage|indexedDB|document\.cookie")
    assert file.name == "theme.js" or not stores.search(file.read_text(encoding="utf-8"))


@pytest.mark.parametrize("file", SCRIPTS, ids=lambda file: file.name)
def test_no_module_is_a_god_file(file: Path) -> None:
    assert len(file.read_text(encoding="utf-8").splitlines()) <= 400


def test_the_page_has_no_script_or_style_of_its_own() -> None:
    page = client().get("/").text

    assert re.findall(r"<script(?![^>]*\bsrc=)|<style|\bstyle=|\bon\w+=", page) == []


def test_everything_comes_with_a_strict_policy() -> None:
    for path in ("/", f"{ASSETS}/main.js", f"{ASSETS}/console.css"):
        headers = client().get(path).headers
        assert headers["content-security-policy"] == CONTENT_SECURITY_POLICY
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
    assert "default-src 'none'" in CONTENT_SECURITY_POLICY
    assert "unsafe" not in CONTENT_SECURITY_POLICY


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_every_file_is_served_with_its_type(file: Path) -> None:
    path = "/" if file.name == "index.html" else f"{ASSETS}/{file.name}"
    response = client().get(path)

    assert response.status_code == 200
    assert response.content == file.read_bytes()
    kinds = {
        ".js": "text/javascript",
        ".css": "text/css",
        ".svg": "image/svg+xml",
        ".html": "text/html",
    }
    assert response.headers["content-type"].startswith(kinds[file.suffix])


def test_an_unchanged_file_is_not_sent_again() -> None:
    first = client().get("/")
    again = client().get("/", headers={"if-none-match": first.headers["etag"]})

    assert again.status_code == 304
    assert again.content == b""


@pytest.mark.parametrize(
    "path", ["/nothing", f"{ASSETS}/", f"{ASSETS}/../app.py", f"{ASSETS}/%2e%2e/__init__.py"]
)
def test_nothing_else_is_there(path: str) -> None:
    response = client().get(path)

    assert response.status_code == 404
    assert response.json()["code"] == "OPERATION_NOT_FOUND"


def test_a_page_cannot_be_posted_to() -> None:
    assert client().post("/").status_code == 405
