"""A person approves in the console a call that an agent made over HTTP."""

import json
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from playwright.sync_api import Browser, expect
from tests.console.conftest import Eyes, Witness, faults, keep
from tests.console.test_sources import served, sign_in

from operations.authority import Grants
from operations.server import hash_key

BOSS, KEY = "the-key-of-the-boss", "k" * 32
MODULE = """
from operations import operation

@operation("task.delete", scopes=["task"])
async def delete(id: int) -> str:
    return f"deleted {id}"
"""


@pytest.fixture
def eyes(browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Eyes]:
    monkeypatch.setenv("GRANTS_KEY", KEY)
    (tmp_path / "work.py").write_text(MODULE)
    (tmp_path / "operations.toml").write_text(
        f"""
modules = ["work.py"]
[access.keys.ann]
sha256 = "{hash_key("the-key-of-ann")}"
scopes = ["task"]
[access.keys.boss]
sha256 = "{hash_key(BOSS)}"
scopes = ["approvals:answer"]
[access.grants]
key = {{ env = "GRANTS_KEY" }}
[tools."task.delete"]
approve = true
[trace]
enabled = false
"""
    )
    with served(tmp_path / "operations.toml") as address:
        witness = Witness(address)
        yield Eyes(browser, witness)
        for context in browser.contexts:
            context.close()
        assert witness.found == []


@pytest.mark.requirement("R63")
def test_a_person_answers_calls_of_an_agent(eyes: Eyes, axe: str) -> None:
    token = Grants(KEY).create("ann", "assistant", operations=["task.*"])

    def delete(id: int) -> str:
        request = Request(  # noqa: S310 - the hub of this test
            f"{eyes.witness.address}/task/delete",
            json.dumps({"id": id}).encode(),
            {"content-type": "application/json", "authorization": f"Bearer {token}"},
        )
        try:
            with urlopen(request, timeout=60) as response:  # noqa: S310
                return str(json.load(response))
        except HTTPError as error:
            return f"{error.code} {json.load(error)['code']}"

    page = eyes.open(csp=False)
    expect(page.get_by_role("link", name="Approvals", exact=True)).to_be_hidden()
    sign_in(page, BOSS)
    page.get_by_role("link", name="Approvals", exact=True).click()
    expect(page.get_by_text("No call waits for approval.")).to_be_visible()

    assert delete(1) == "428 APPROVAL_REQUIRED"
    assert delete(2) == "428 APPROVAL_REQUIRED"
    first = page.get_by_role("row").filter(has_text='"id": 1')
    expect(first).to_contain_text("task.delete")
    expect(first).to_contain_text("ann")
    expect(first).to_contain_text("through assistant")
    keep(page, "approvals")
    assert faults(page, axe, None, "approvals") == []
    first.get_by_role("button", name="Approve").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_text("task.delete: approved.")).to_be_visible()
    expect(first).to_have_count(0)
    page.get_by_role("row").filter(has_text='"id": 2').get_by_role("button", name="Deny").click()
    expect(page.get_by_text("No call waits for approval.")).to_be_visible()

    assert delete(1) == "deleted 1"
    assert delete(1) == "428 APPROVAL_REQUIRED"
    assert delete(2) == "403 ACCESS_DENIED"
