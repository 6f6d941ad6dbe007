"""The console shows the view of an app in a frame that reaches only its own server, as the person allows."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect
from starlette.testclient import TestClient
from tests.console.conftest import Eyes, Witness, faults, keep
from tests.console.test_sources import served

from operations import OperationRegistry
from operations.server import create_app
from operations.server.console.frame import content_security_policy

CLOCK = r'''
import sys
from mcp.server.apps import Apps
from mcp.server.mcpserver import MCPServer
from mcp_types import ToolAnnotations

apps, place = Apps(), sys.argv[1]
READS = ToolAnnotations(read_only_hint=True)

@apps.tool(resource_uri="ui://clock/app.html", annotations=READS)
def show(city: str) -> str:
    """Show a clock."""
    return f"noon in {city}, says {place}"

@apps.tool(resource_uri="ui://clock/app.html", visibility=["app"], annotations=READS)
def later() -> str:
    return f"later in {place}"

@apps.tool(resource_uri="ui://clock/app.html", visibility=["app"])
def set_clock(to: str) -> str:
    return f"{place} is set to {to}"

@apps.tool(resource_uri="ui://clock/app.html", visibility=["app"], annotations=READS, name="set zone!")
def zone() -> str:
    return f"zone of {place}"

@apps.tool(resource_uri="ui://clock/app.html", visibility=["app"], annotations=READS)
def moved() -> str:
    return f"moved in {place}"

@apps.tool(resource_uri="ui://clock/app.html", visibility=["model"])
def hidden() -> str:
    return "never"

PAGE = """<!doctype html><html><head><title>Clock</title></head><body><p id=result></p><ol id=log></ol><script>
const pending = new Map();
let last = 0;
const add = (text) => { const item = document.createElement("li"); item.textContent = text; log.append(item); };
const post = (message) => parent.postMessage({ jsonrpc: "2.0", ...message }, "*");
const ask = (method, params) => new Promise((resolve) => {
  pending.set(++last, resolve);
  post({ id: last, method, params });
});
addEventListener("message", ({ data }) => {
  if (data.id) pending.get(data.id)(data);
  if (data.method === "ui/notifications/tool-input") add(`input ${data.params.arguments.city}`);
  if (data.method === "ui/notifications/tool-result") result.textContent = data.params.content[0].text;
});
const call = async (name, input = {}) => {
  const { result, error } = await ask("tools/call", { name, arguments: input });
  add(`${name}: ${error ? error.message : result.content[0].text}`);
};
const tried = (what, attempt) => Promise.resolve().then(attempt).then(
  () => add(`${what} possible`), () => add(`${what} refused`));
(async () => {
  const appInfo = { name: "clock", version: "1" };
  await ask("ui/initialize", { appInfo, appCapabilities: {}, protocolVersion: "2026-01-26" });
  post({ method: "ui/notifications/initialized", params: {} });
  await call("later");
  await call("set zone!");
  await call("moved");
  await call("set_zone_");
  await call("hidden");
  await call("rome.later");
  await call("../rome.later");
  const read = await ask("resources/read", { uri: "ui://clock/app.html" });
  add(`page ${read.result.contents[0].text.length > 100}`);
  await tried("origin", () => { if (origin === "null") throw 0; });
  await tried("parent", () => parent.document.title);
  await tried("cookie", () => document.cookie);
  await tried("storage", () => localStorage.length);
  await tried("fetch", () => fetch("/operations", { mode: "no-cors" }));
  await call("set_clock", { to: "one" });
  await call("set_clock", { to: "two" });
  post({ method: "ui/notifications/size-changed", params: { height: 1e9 } });
})();
onclick = () => { location.href = "/~console/frame?connect=https://example.com"; };
</script></body></html>"""
apps.add_html_resource("ui://clock/app.html", PAGE)
MCPServer("clock", extensions=[apps]).run("stdio")
'''


@pytest.fixture
def eyes(browser: Browser, tmp_path: Path) -> Iterator[Eyes]:
    (tmp_path / "clock.py").write_text(CLOCK)
    for place in ("oslo", "rome"):
        with (tmp_path / "operations.toml").open("a") as file:
            file.write(
                f"""
[mcp.{place}]
command = "{sys.executable}"
args = ["{tmp_path / "clock.py"}", "{place}"]
trust_annotations = true
"""
            )
    with (tmp_path / "operations.toml").open("a") as file:
        file.write('[tools."oslo.moved"]\nrename = "elsewhere.gone"\n')
    with served(tmp_path / "operations.toml") as address:
        witness = Witness(address)
        yield Eyes(browser, witness)
        for context in browser.contexts:
            context.close()


def shown(eyes: Eyes) -> Page:
    """Call the tool with the view; return the page."""
    page = eyes.open("#/oslo.show")
    page.get_by_label("city").fill("Bergen")
    page.get_by_role("button", name="Call", exact=True).click()
    return page


@pytest.mark.requirement("R16")
def test_a_view_calls_tools_of_its_own_server_and_the_person_confirms_mutations(
    eyes: Eyes, axe: str
) -> None:
    page = shown(eyes)
    view = page.frame_locator(".view iframe")
    expect(view.locator("#result")).to_have_text("noon in Bergen, says oslo")
    question = page.get_by_role("alertdialog")
    expect(question).to_contain_text("oslo.set_clock")
    expect(question).to_contain_text('"one"')
    assert faults(page, axe, None, "a view") == []
    keep(page, "view")
    question.get_by_role("button", name="Deny").click()
    expect(question).to_contain_text('"two"')
    log = view.locator("li")
    expect(log).to_have_text(
        [
            "input Bergen",
            "later: later in oslo",
            "set zone!: zone of oslo",
            "moved: moved in oslo",
            "set_zone_: Unknown tool: set_zone_",
            "hidden: Unknown tool: hidden",
            "rome.later: Unknown tool: rome.later",
            "../rome.later: Unknown tool: ../rome.later",
            "page true",
            *(f"{what} refused" for what in ("origin", "parent", "cookie", "storage", "fetch")),
            "set_clock: The person has denied the call.",
        ]
    )
    question.get_by_role("button", name="Allow").click()
    expect(log.last).to_have_text("set_clock: oslo is set to two")
    expect(question).to_have_count(0)
    frame = page.locator(".view iframe")
    expect(frame).to_have_attribute("sandbox", "allow-scripts")
    expect(frame).to_have_attribute("allow", "")
    page.wait_for_function(
        "() => frames[0] && document.querySelector('.view iframe').style.height === '800px'"
    )
    # A view that leaves its page gets no other policy.
    view.locator("#log").click()
    expect(view.locator("body")).to_contain_text("Pages of that Origin may not use this server")
    # The browser reports what the policy has refused, and the tools and pages that are none.
    eyes.witness.found.clear()


@pytest.mark.requirement("R16")
@pytest.mark.parametrize(
    ("query", "allowed"),
    [
        ("connect=https://api.example.com", "connect-src https://api.example.com;"),
        (
            "resource=https://*.example.com:8443",
            "script-src 'unsafe-inline' https://*.example.com:8443;",
        ),
        ("", "connect-src 'none';"),
        ("connect=*", "connect-src 'none';"),
        ("connect=https:", "connect-src 'none';"),
        ("connect='self'", "connect-src 'none';"),
        ("connect=https://a.example;script-src *", "connect-src 'none';"),
        ("connect=https://a.example%0d%0ax: y", "connect-src 'none';"),
        ("connect=https://a.example https://b.example", "connect-src 'none';"),
        ("base=javascript:1&frame=data:", "frame-src 'none';"),
        ("&".join(["connect=https://a.example"] * 1000), "connect-src 'none';"),
    ],
)
def test_the_policy_of_a_frame_allows_only_hosts(query: str, allowed: str) -> None:
    policy = content_security_policy(query)

    assert allowed in f"{policy};"
    assert policy.startswith("sandbox allow-scripts; default-src 'none'; ")
    assert "frame-ancestors 'self'" in policy
    assert "\n" not in policy


def test_the_page_of_a_frame_has_the_policy_of_its_query() -> None:
    app = create_app(OperationRegistry(), console=True)
    client = TestClient(app, base_url="http://127.0.0.1")
    response = client.get("/~console/frame?connect=https://api.example.com")

    assert response.headers["content-security-policy"] == content_security_policy(
        "connect=https://api.example.com"
    )
    assert "x-frame-options" not in response.headers
    assert response.headers["content-type"].startswith("text/html")
