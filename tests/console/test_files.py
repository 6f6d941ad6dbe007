"""The files of the console, and the headers that they are served with."""

import re
from pathlib import Path

import pytest
from starlette.testclient import TestClient
from tests.console.conftest import Eyes

from operations import OperationRegistry
from operations.server import create_app
from operations.server.console import ASSETS, CONTENT_SECURITY_POLICY

STATIC = Path(__file__).resolve().parent.parent.parent / "src/operations/server/console/static"
FILES = sorted(STATIC.iterdir())
SCRIPTS = [file for file in FILES if file.suffix == ".js"]
PRELOAD = re.compile(rb' *<link rel="modulepreload" href="~console/([^"]+)">\n')


def client() -> TestClient:
    return TestClient(create_app(OperationRegistry(), console=True), base_url="http://127.0.0.1")


@pytest.mark.parametrize("file", SCRIPTS, ids=lambda file: file.name)
def test_no_module_is_a_god_file(file: Path) -> None:
    assert len(file.read_text(encoding="utf-8").splitlines()) <= 400


def test_the_page_has_no_script_or_style_of_its_own() -> None:
    page = client().get("/").text

    assert re.findall(r"<script(?![^>]*\bsrc=)|<style|\bstyle=|\bon\w+=", page) == []


def test_the_page_preloads_every_module() -> None:
    preloaded = {name.decode() for name in PRELOAD.findall(client().get("/").content)}

    # theme.js is a classic script, which the page loads itself.
    assert preloaded == {file.name for file in SCRIPTS} - {"theme.js"}


# Every way from a string to markup, or to a script from elsewhere.
SINKS = {
    "innerHTML": "document.body.innerHTML = text",
    "outerHTML": "document.querySelector('#main').outerHTML = text",
    "insertAdjacentHTML": "document.body.insertAdjacentHTML('beforeend', text)",
    "document.write": "document.write(text)",
    "DOMParser": "new DOMParser().parseFromString(text, 'text/html')",
    "createContextualFragment": "document.createRange().createContextualFragment(text)",
    "srcdoc": "document.createElement('iframe').srcdoc = text",
    "script": "document.createElement('script').src = text",
}


@pytest.mark.requirement("R16")
def test_the_browser_does_not_turn_text_into_markup(eyes: Eyes) -> None:
    page = eyes.open()
    attempts = ", ".join(f"{name!r}: (text) => {{ {code}; }}" for name, code in SINKS.items())
    refused = page.evaluate(
        f"() => Object.entries({{{attempts}}}).filter(([, attempt]) => {{"
        " try { attempt('1 + 1'); return false; } catch { return true; } }).map(([name]) => name)"
    )

    assert refused == list(SINKS)
    # Each refusal is an error on the page's console.
    eyes.witness.found.clear()


def test_every_file_has_a_strict_content_security_policy() -> None:
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
    assert PRELOAD.sub(b"", response.content) == file.read_bytes()
    kinds = {
        ".js": "text/javascript",
        ".css": "text/css",
        ".svg": "image/svg+xml",
        ".html": "text/html",
    }
    assert response.headers["content-type"].startswith(kinds[file.suffix])


@pytest.mark.parametrize("condition", ["{}", "W/{}", '"other", W/{}', "*"])
def test_an_unchanged_file_is_not_sent_again(condition: str) -> None:
    tag = client().get("/").headers["etag"]
    again = client().get("/", headers={"if-none-match": condition.format(tag)})

    assert again.status_code == 304
    assert again.content == b""


@pytest.mark.parametrize(
    "path", ["/nothing", f"{ASSETS}/", f"{ASSETS}/../app.py", f"{ASSETS}/%2e%2e/__init__.py"]
)
def test_no_other_paths_exist(path: str) -> None:
    response = client().get(path)

    assert response.status_code == 404
    assert response.json()["code"] == "OPERATION_NOT_FOUND"


def test_a_page_rejects_post_requests() -> None:
    assert client().post("/").status_code == 405
