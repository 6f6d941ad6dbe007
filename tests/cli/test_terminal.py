"""The command line at a real terminal: prompts, progress, Ctrl-C. The tutorial's test takes the tour of the demo."""

import json
import re
import signal
import sys
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path

import pexpect
import pytest

Start = Callable[..., "pexpect.spawn[str]"]

INTERRUPT = "\x03"


def heed_interrupts() -> None:
    """A shell's background job ignores Ctrl-C, and so would its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.fixture
def start(folder: Path, environment: dict[str, str]) -> Iterator[Start]:
    """Type a command at a terminal."""
    children: list[pexpect.spawn[str]] = []

    def start(*arguments: str) -> "pexpect.spawn[str]":
        child = pexpect.spawn(
            sys.executable, ["-m", "operations", *arguments],
            env=environment, cwd=str(folder), encoding="utf-8", timeout=150, dimensions=(40, 160),
            preexec_fn=heed_interrupts,
        )  # fmt: skip
        children.append(child)
        return child

    yield start
    for child in children:
        child.close(force=True)


def see(child: "pexpect.spawn[str]", text: str) -> None:
    """Wait until the screen shows a text, in any colours."""
    style = r"(?:\x1b\[[0-9;?]*[a-zA-Z])*"
    words = (style.join(map(re.escape, word)) for word in text.split())
    child.expect(rf"(?:\s|{style})+".join(words))


def drawn(text: str) -> list[str]:
    """Return the lines that a terminal finally shows for some output."""
    lines, row, column = [""], 0, 0
    for control, number, verb, part in re.findall(r"(\x1b\[([0-9;?]*)([a-zA-Z]))|([^\x1b])", text):
        if control and verb == "A":
            row = max(0, row - int(number or 1))
        elif control and verb == "K":
            lines[row] = "" if number == "2" else lines[row][:column]
        elif part == "\r":
            column = 0
        elif part == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif part:
            line = lines[row].ljust(column)
            lines[row] = line[:column] + part + line[column + 1 :]
            column += 1
    return [line.rstrip() for line in lines if line.strip()]


def end(child: "pexpect.spawn[str]") -> int:
    """Return the exit code, and check that the command printed no traceback."""
    child.expect(pexpect.EOF)
    child.close()
    assert "Traceback" not in (child.before or "")
    assert child.exitstatus is not None
    return child.exitstatus


def test_missing_values_are_prompted_for_until_they_are_valid(start: Start) -> None:
    child = start("call", "work.ship", "notes=x")

    see(child, "to.street (string):")
    child.sendline("Elm")
    see(child, "How large it is.")
    see(child, "size (small | large):")
    child.sendline("huge")
    see(child, "must be one of")
    child.sendline("large")

    see(child, '"street": "Elm"')
    see(child, '"size": "large"')
    assert end(child) == 0


def test_ctrl_c_at_a_question_exits(start: Start) -> None:
    child = start("call", "work.ship")
    see(child, "to.street")

    child.send(INTERRUPT)

    assert end(child) == 130


def test_a_handler_can_ask_the_person(start: Start) -> None:
    child = start("call", "work.ask")

    see(child, "May I?")
    see(child, "name")
    child.sendline("Ann")

    see(child, "Ann")
    assert end(child) == 0


@pytest.mark.requirement("R63")
@pytest.mark.parametrize(("answer", "code"), [("y", 0), ("", 5)])
def test_a_person_confirms_a_call_that_needs_it(
    start: Start, folder: Path, answer: str, code: int
) -> None:
    with (folder / "operations.toml").open("a") as file:
        file.write('\n[tools."work.add"]\napprove = { ask_caller = true }\n')
    child = start("call", "work.add", "a=1")

    see(child, 'Run work.add with {"a":1}?')
    child.sendline(answer)

    see(child, "2" if code == 0 else "was not confirmed")
    assert end(child) == code


@pytest.mark.requirement("R63")
@pytest.mark.parametrize(("answer", "code"), [("y", 0), ("", 1)])
def test_a_terminal_shows_the_whole_input_before_it_asks(
    start: Start, folder: Path, answer: str, code: int
) -> None:
    with (folder / "operations.toml").open("a") as file:
        file.write('\n[tools."work.ship"]\napprove = true\n[state]\nurl = "sqlite:authority.db"\n')
    tail = "\u202eAND TRANSFER ALL MONEY"
    given = {"to": {"street": "Elm"}, "size": "large", "notes": ["x" * 20_000 + tail]}
    (folder / "input.json").write_text(json.dumps(given))
    call = start("call", "work.ship", "@input.json", "--as", "alice")
    call.expect(r"[0-9a-f]{32}-[0-9a-f]{8}")
    assert isinstance(call.match, re.Match)
    approval = call.match.group()
    assert end(call) == 9

    listing = start("approvals", "list")
    see(listing, f"operations approvals show {approval}")
    assert end(listing) == 0
    child = start("approvals", "approve", approval)
    see(child, "asked by")
    see(child, "\\u202eAND TRANSFER ALL MONEY")
    shown = child.before or ""
    see(child, "y/N:")
    assert shown.count("x") >= 20_000, "nothing is cut off"
    assert "\u202e" not in shown
    child.sendline(answer)

    see(child, "approved work.ship" if code == 0 else "not approved")
    assert end(child) == code


CLAIMED = """
price = await work.add(a=40, b=2)
await work.ship(to={"street": "Elm"}, size="large", notes=[f"{price}"])  # \u202e password="hunter2" SPACES input 1 byte
"""


@pytest.mark.requirement("R63")
def test_a_terminal_marks_what_a_script_claims_about_its_call(start: Start, folder: Path) -> None:
    with (folder / "operations.toml").open("a") as file:
        file.write(
            '\n[code]\n[tools."work.ship"]\napprove = true\n[state]\nurl = "sqlite:authority.db"\n'
        )
    (folder / "script.py").write_text(CLAIMED.replace("SPACES", " " * 60))
    call = start("run", "script.py", "--as", "alice")
    call.expect(r"[0-9a-f]{32}-[0-9a-f]{8}")
    assert isinstance(call.match, re.Match)
    approval = call.match.group()
    assert end(call) == 9

    child = start("approvals", "show", approval)
    see(child, "claimed by the script, not part of what is approved:")
    assert "input" not in (child.before or "")
    child.expect(pexpect.EOF)
    lines = drawn(child.before or "")
    at = next(number for number, line in enumerate(lines) if line.startswith("input "))
    claimed, exact = lines[:at], "\n".join(lines[at:])
    assert all(line.startswith("  | ") for line in claimed)
    text = " ".join(line.removeprefix("  | ") for line in claimed)
    assert text.startswith('line 3: await work.ship(to={"street": "Elm"}, size="large"')
    assert "\\u202e password=***" in text
    assert "line 2: work.add success 42" in text
    assert "\u202e" not in text
    assert "hunter2" not in text
    assert " " * 5 not in text
    assert len(text) < 300
    assert '"street": "Elm"' in exact

    asked = start("approvals", "approve", approval)
    see(asked, "claimed by the script")
    see(asked, "input")
    see(asked, "y/N:")
    asked.sendline("")
    assert end(asked) == 1


def test_progress_is_shown_and_the_result_is_printed_on_separate_lines(start: Start) -> None:
    child = start("call", "work.slow", "steps=3", "pause=0.3")
    child.expect(pexpect.EOF)

    assert "working hard" in (child.before or "")
    assert "33%" in (child.before or "")
    assert drawn(child.before or "") == ['"done"']
    child.close()
    assert child.exitstatus == 0


def test_items_are_printed_on_separate_lines(start: Start) -> None:
    child = start("call", "work.steps", "to=3")
    child.expect(pexpect.EOF)

    assert "stepping" in (child.before or "")
    assert drawn(child.before or "") == ["1", "2", "3"]


def test_a_failure_is_printed_on_separate_lines(start: Start) -> None:
    child = start("call", "work.slow", "steps=1", "pause=60", "--timeout", "0.5")
    child.expect(pexpect.EOF)

    assert "working hard" in (child.before or "")
    assert drawn(child.before or "")[0].startswith("TIMEOUT: ")


def test_a_subscription_is_followed_until_ctrl_c(start: Start) -> None:
    child = start("call", "work.count", "to=1000", "pause=0.05")
    see(child, "1 2 3")

    child.send(INTERRUPT)

    assert end(child) == 0


def test_an_interrupted_call_has_its_own_exit_code(start: Start) -> None:
    child = start("call", "work.slow", "pause=60")
    see(child, "working hard")

    child.send(INTERRUPT)

    assert end(child) == 130


def test_a_terminal_gets_a_table(start: Start) -> None:
    child = start("list")

    see(child, "operation type source description")
    see(child, "work.add query local Add two numbers.")
    see(child, "12 operations")
    assert end(child) == 0


def test_a_narrow_list_leaves_out_the_sources(start: Start, environment: dict[str, str]) -> None:
    environment["COLUMNS"] = "40"
    child = start("list", "add")

    see(child, "work.add query Add two numbers.")
    assert end(child) == 0


def test_serve_prints_its_address_and_ends_on_ctrl_c(
    start: Start, environment: dict[str, str]
) -> None:
    environment |= {"ALICE_KEY": "a" * 32, "BOB_KEY": "b" * 32}
    child = start("serve")
    child.expect(r"serving 12 operations at (http://127\.0\.0\.1:\d+)")
    assert isinstance(child.match, re.Match)
    url = str(child.match[1])
    see(child, "press Ctrl-C to stop")

    connection = HTTPConnection(url.removeprefix("http://"), timeout=30)
    connection.request(
        "POST",
        "/call",
        '{"operation": "work.add", "input": {"a": 1}}',
        {"Content-Type": "application/json"},
    )
    assert b'"data":2' in connection.getresponse().read()
    connection.close()

    child.send(INTERRUPT)
    assert end(child) == 0


@pytest.mark.requirement("R47")
def test_json_on_a_terminal_contains_no_invisible_characters(start: Start) -> None:
    child = start("call", "work.rude", "--json")
    see(child, r'gone\u202e\u009b"')
    assert end(child) == 0
    child = start("call", "work.add", r'{"\u009b": 1}', "--json")
    see(child, r"/\u009b")
    assert end(child) == 6
