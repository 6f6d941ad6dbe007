"""The documentation site: it builds without a warning, shows every public name, and fetches nothing from elsewhere."""

import importlib
import os
import re
import subprocess
import sys
from html import unescape
from pathlib import Path

import pytest
from tests.conftest import PROJECT
from tests.limits import scaled

# Building takes 20 s on an idle machine.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

pytest.importorskip("mkdocs", reason="the site's generator is not installed: scripts/install --dev")
pytest.importorskip("mkdocstrings", reason="the site's generator is not installed")

PUBLIC = [
    "operations", "operations.openapi", "operations.mcp", "operations.calls", "operations.pubsub", "operations.server",
]  # fmt: skip
FETCHED = re.compile(
    r"""<(?:script|img|iframe|link)\b[^>]*\b(?:src|href)=["']?(?:https?:)?//[^>]*>"""
)
STYLED = re.compile(r"""(?:@import|url\()\s*["']?(?:https?:)?//[^)"']+""")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `scripts/docs` builds it."""
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--site-dir", str(folder)],
        cwd=PROJECT, capture_output=True, text=True, timeout=scaled(280), check=False,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    return folder


def test_every_page_of_the_docs_is_on_the_site(site: Path) -> None:
    navigation = (site / "index.html").read_text(encoding="utf-8")
    pages = [path.relative_to(PROJECT / "docs") for path in (PROJECT / "docs").rglob("*.md")]

    for page in [
        *pages,
        Path("screenshots.md"),
        Path("changelog.md"),
        Path("reference/operations.md"),
    ]:
        address = str(page.with_suffix(".html")).replace("README.html", "index.html")
        assert (site / address).exists(), page
        assert f'href="{address}"' in navigation, page


@pytest.mark.parametrize("module", PUBLIC)
def test_the_reference_has_every_public_name(site: Path, module: str) -> None:
    page = (site / "reference" / f"{module}.html").read_text(encoding="utf-8")

    headings = set(re.findall(r'<h3 id="([^"]+)"', page))

    names = set(importlib.import_module(module).__all__) - {"__version__"}
    assert {f"{module}.{name}" for name in names} <= headings


def test_the_reference_has_every_key_of_the_file(site: Path) -> None:
    page = unescape((site / "reference" / "file.html").read_text(encoding="utf-8"))

    for path, key in (
        ("[openapi.NAME]", "document"),
        ("[openapi.NAME.auth]", "token"),
        ("[openapi.NAME.auth.token.exchange]", "audience"),
        ("[mcp.NAME.auth.exchange]", "token_url"),
        ("[tools.NAME]", "max_bytes"),
        ("[serve]", "processes"),
        ("[serve.mcp]", "stateless"),
        ("[access.jwt]", "issuer"),
        ("[limits]", "calls_per_caller"),
    ):
        section = page.partition(f"<code>{path}</code>")[2].partition("<h2")[0]
        assert f"<code>{key}</code>" in section, path


def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    pages = {path: path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    styles = {path: path.read_text(encoding="utf-8") for path in site.rglob("*.css")}

    assert len(pages) > 30
    for path, text in pages.items():
        assert FETCHED.findall(unescape(text)) == [], path
    for path, text in styles.items():
        assert STYLED.findall(text) == [], path
