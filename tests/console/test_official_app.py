"""A view made with the official SDK for apps (`@modelcontextprotocol/ext-apps`) in the console."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Route, expect
from tests.console.conftest import Eyes, Witness, faults, keep
from tests.console.test_sources import served
from tests.node_packages import install_node_packages

FOLDER = Path(__file__).parent / "app"
SDK = "@modelcontextprotocol/ext-apps/dist/src/app-with-deps.js"

SERVER = r'''
import sys
from pathlib import Path
from mcp.server.apps import Apps
from mcp.server.mcpserver import MCPServer
from mcp_types import ToolAnnotations

apps = Apps()
READS = ToolAnnotations(read_only_hint=True)

@apps.tool(resource_uri="ui://clock/app.html", annotations=READS)
def show(city: str) -> dict[str, str]:
    """Show a clock."""
    return {"city": city, "view": "ui://clock/app.html"}

@apps.tool(resource_uri="ui://clock/app.html", visibility=["app"], annotations=READS)
def later(view: str) -> str:
    return f"later: {view}"

@apps.tool(resource_uri="ui://clock/app.html", visibility=["app"], annotations=READS)
def save(text: str) -> str:
    Path(sys.argv[2]).write_text(text)
    return "saved"

apps.add_html_resource("ui://clock/app.html", Path(sys.argv[1]).read_text())
MCPServer("clock", extensions=[apps]).run("stdio")
'''

PAGE = """<!doctype html><html><head><title>Clock</title><script type=module>%s</script></head><body>
<ol id=log></ol><script type=module>
const add = (text) => { const item = document.createElement("li"); item.textContent = text; log.append(item); };
const { App } = globalThis.SDK;
const app = new App({ name: "clock", version: "1" }, {}, { autoResize: true });
const given = new Promise((resolve) => app.addEventListener("toolresult", resolve));
app.onteardown = async () => {
  await app.callServerTool({ name: "save", arguments: { text: "a draft" } });
  return {};
};
await app.connect();
add(`host: ${app.getHostVersion().name}, can ${Object.keys(app.getHostCapabilities()).sort()}`);
const { structuredContent } = await given;
add(`shown: ${structuredContent.city}`);
const { content } = await app.callServerTool({ name: "later", arguments: { view: structuredContent.view } });
add(content[0].text);
const read = await app.readServerResource({ uri: structuredContent.view });
add(`page: ${read.contents[0].mimeType}`);
const say = (text) => app.sendMessage({ role: "user", content: [{ type: "text", text }] });
add(`said: ${JSON.stringify(await say("Hello\\u202e"))}`);
await app.updateModelContext({ content: [{ type: "text", text: "first" }] });
await app.updateModelContext({ content: [{ type: "text", text: "noon" }], structuredContent: { hour: 12 } });
add(`mode: ${(await app.requestDisplayMode({ mode: "fullscreen" })).mode}`);
for (const url of ["javascript:alert(1)", "data:text/html,x", "https://bank.example@evil.example/", "/operations", "file:///etc"])
  add(`${url}: ${(await app.openLink({ url })).isError}`);
for (let number = 0; number < 2; number++)
  add(`link: ${JSON.stringify(await app.openLink({ url: "https://docs.example/a?b=1" }))}`);
</script></body></html>"""


@pytest.fixture
def eyes(browser: Browser, tmp_path: Path) -> Iterator[Eyes]:
    install_node_packages(FOLDER, SDK)
    script = (FOLDER / "node_modules" / SDK).read_text()
    # An inline script exports nothing.
    found = re.search(r"export\{(.*?)\};?\s*$", script, re.DOTALL)
    assert found is not None
    names = re.sub(r"([\w$]+) as ([\w$]+)", r"\2:\1", found[1])
    script = f"{script[: found.start()]}globalThis.SDK={{{names}}};".replace(
        "</script", "<\\/script"
    )
    (tmp_path / "page.html").write_text(PAGE.replace("%s", script))
    (tmp_path / "clock.py").write_text(SERVER)
    (tmp_path / "operations.toml").write_text(
        f"""
[mcp.oslo]
command = "{sys.executable}"
args = ["{tmp_path / "clock.py"}", "{tmp_path / "page.html"}", "{tmp_path / "saved"}"]
trust_annotations = true
"""
    )
    with served(tmp_path / "operations.toml") as address:
        yield Eyes(browser, Witness(address))
        for context in browser.contexts:
            context.close()


@pytest.mark.requirement("R16")
def test_a_view_of_the_official_sdk_uses_what_the_console_offers(
    eyes: Eyes, axe: str, tmp_path: Path
) -> None:
    page = eyes.open("#/oslo.show")
    asked: list[dict[str, str]] = []

    def answer(route: Route) -> None:
        asked.append(route.request.all_headers())
        route.fulfill(body="docs", content_type="text/plain")

    page.context.route("https://docs.example/**", answer)
    page.get_by_label("city").fill("Bergen")
    page.get_by_role("button", name="Call", exact=True).click()
    log = page.frame_locator(".view iframe").locator("li")
    question = page.get_by_role("alertdialog")
    expect(question).to_contain_text("https://docs.example/a?b=1")
    expect(question).to_contain_text("docs.example in a new tab")
    said = page.get_by_role("log", name="Messages of the view")
    expect(said.locator("li")).to_have_text(["The view says: HelloU+202E"])
    expect(said.locator("pre")).to_have_text('noon { "hour": 12 }')
    expect(said).to_contain_text("For a model, which the console does not have")
    assert faults(page, axe, None, "a view of the official SDK") == []
    keep(page, "official-app")
    question.get_by_role("button", name="Deny").click()
    expect(log.last).to_have_text('link: {"isError":true}')
    with page.context.expect_page() as opened:
        question.get_by_role("button", name="Open").click()
    opened.value.wait_for_load_state()
    expect(log).to_have_text(
        [
            "host: operations, can message,openLinks,serverResources,serverTools",
            "shown: Bergen",
            "later: ui://clock/app.html",
            "page: text/html;profile=mcp-app",
            "said: {}",
            "mode: inline",
            "javascript:alert(1): true",
            "data:text/html,x: true",
            "https://bank.example@evil.example/: true",
            "/operations: true",
            "file:///etc: true",
            'link: {"isError":true}',
            "link: {}",
        ]
    )
    assert opened.value.url == "https://docs.example/a?b=1"
    assert opened.value.evaluate("window.opener") is None
    assert len(asked) == 1
    assert "referer" not in asked[0]
    # Another call replaces the view, which may finish its work first.
    page.get_by_role("button", name="Call", exact=True).click()
    expect(question).to_contain_text("https://docs.example/a?b=1")
    assert (tmp_path / "saved").read_text() == "a draft"
