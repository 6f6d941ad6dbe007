"""The tutorial, followed word for word at real terminals in a fresh home folder.

A fenced block of the page is a file or a terminal session; the test fails for any other block.

    ```python title="garden.py"            a file to save, in the folder the first terminal is in
    ```console                             typed into the first terminal, which begins in the checkout
    ```console title="second terminal"     typed into another one, which begins where the first one is then

In a terminal, `$ ` begins a command, `^C` is Ctrl-C, and every other line is expected on the screen. In such a line,
`...` matches any text; a line with only `...` matches any number of lines. In terminals other than the first, the last
command of a block is left running. Ports of the page are replaced by free ones.
"""

import contextlib
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pexpect
import pytest
from pyte import Screen, Stream
from tests.conftest import PROJECT
from tests.limits import scaled
from tests.servers import free_port, installer_environment

PAGE = PROJECT / "docs" / "tutorial.md"
PORTS = ("8000", "8001", "4222")
FENCE = re.compile(r'^```(\w+)(?: title="([^"\n]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
MISSING = [tool for tool in ("bash", "curl", "make") if shutil.which(tool) is None]
FIRST = "first terminal"
PROMPT = "[your turn] "
PATIENCE = 60.0
"""Seconds until a command must have shown the output of the page."""


@dataclass
class Typed:
    """A line to type, None for Ctrl-C, and the expected screen."""

    line: str | None
    shown: list[str] = field(default_factory=list[str])

    @property
    def pattern(self) -> str:
        """The expected text of the screen."""
        lines = [
            r"(?:.*\n)*?" if line == "..." else ".*".join(map(re.escape, line.split("..."))) + "\n"
            for line in "\n".join(self.shown).rstrip().splitlines()
        ]
        return "".join(lines)

    def begins(self, raw: str) -> bool:
        """Return whether the screen shows the expected text, possibly followed by more."""
        return re.match(self.pattern, look(raw)) is not None


def read_session(text: str) -> list[Typed]:
    """The lines to type, in order."""
    typed: list[Typed] = []
    for line in text.splitlines():
        if line == "^C":
            typed.append(Typed(None))
        elif line.startswith("$ "):
            typed.append(Typed(line.removeprefix("$ ")))
        else:
            typed[-1].shown.append(line.rstrip())
    return typed


def heed_interrupts() -> None:
    """A shell's background job ignores Ctrl-C, and so would its children."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Terminal:
    """A shell at a terminal, and the screen that a person sees."""

    def __init__(self, folder: str, path: str, home: Path) -> None:
        kept = {
            key: value
            for key, value in installer_environment().items()
            if not key.startswith(("MAKE", "COV", "PYTHON"))
        }
        self._child = pexpect.spawn(
            "bash", ["--noprofile", "--norc", "--noediting"],
            cwd=folder, encoding="utf-8", echo=False, dimensions=(50, 100), preexec_fn=heed_interrupts,
            env={
                **kept, "PATH": path, "HOME": str(home), "PS1": PROMPT, "TERM": "xterm-256color", "LANG": "C.UTF-8",
                "XDG_STATE_HOME": str(home / "state"), "VIRTUAL_ENV_DISABLE_PROMPT": "1",
            },
        )  # fmt: skip
        self._read(self._asks)

    def play(self, session: list[Typed], *, stay: bool) -> None:
        """Type one line after the other, and compare the screen with the page."""
        for typed, after in zip(session, [*session[1:], None], strict=True):
            goes_on = typed.line is not None and (stay if after is None else after.line is None)
            if goes_on:
                self._type(typed, typed.begins)
            else:
                screen = self._type(typed, self._asks)
                assert re.fullmatch(typed.pattern, screen), self._differ(typed, screen)

    def ask(self, line: str) -> str:
        """Return the output of a command."""
        return self._type(Typed(line), self._asks).strip()

    def close(self) -> None:
        # End the programs in it first: nats-server reloads its config on the hangup signal of the terminal.
        with contextlib.suppress(OSError):
            os.killpg(os.tcgetpgrp(self._child.fileno()), signal.SIGKILL)
        self._child.close(force=True)

    def _type(self, typed: Typed, seen: Callable[[str], bool]) -> str:
        if typed.line is None:
            self._child.sendintr()
        else:
            self._child.sendline(typed.line)
        raw = self._read(seen)
        assert seen(raw), self._differ(typed, look(raw))
        return look(raw.removesuffix(PROMPT))

    def _read(self, seen: Callable[[str], bool]) -> str:
        """Return the output until enough was seen, or no further output is expected."""
        raw, end = "", time.monotonic() + scaled(PATIENCE)
        with contextlib.suppress(pexpect.TIMEOUT, pexpect.EOF):
            while not seen(raw):
                raw += self._child.read_nonblocking(65536, timeout=max(end - time.monotonic(), 0))
        return raw

    @staticmethod
    def _asks(raw: str) -> bool:
        return raw.endswith(PROMPT)

    @staticmethod
    def _differ(typed: Typed, screen: str) -> str:
        expected = "\n".join(typed.shown)
        return f"$ {typed.line or '^C'}\n--- the page shows\n{expected}\n--- the screen shows\n{screen}"


def look(raw: str) -> str:
    """Return the lines that a terminal shows, without colours and without erased text."""
    lines = raw.split("\n")
    screen = Screen(max(map(len, lines)) + 1, len(lines))
    Stream(screen).feed(raw)
    text = "\n".join(line.rstrip() for line in screen.display).rstrip()
    return text + "\n" if text else ""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def terminals(home: Path) -> Iterator[dict[str, Terminal]]:
    bin_ = str(Path(sys.executable).parent)
    path = ":".join(part for part in os.environ["PATH"].split(":") if part != bin_)
    open_ = {FIRST: Terminal(str(PROJECT), path, home)}
    yield open_
    for terminal in open_.values():
        terminal.close()


@pytest.mark.slow
@pytest.mark.alone
@pytest.mark.timeout(300)
@pytest.mark.skipif(bool(MISSING), reason=f"not on this machine: {', '.join(MISSING)}")
def test_the_tutorial_followed_word_for_word_works(
    home: Path, terminals: dict[str, Terminal]
) -> None:
    ports = {port: str(free_port()) for port in PORTS}
    page = re.sub("|".join(PORTS), lambda port: ports[port[0]], PAGE.read_text(encoding="utf-8"))
    first = terminals[FIRST]

    for language, title, text in FENCE.findall(page):
        if language == "console":
            name = title or FIRST
            if name not in terminals:
                terminals[name] = Terminal(first.ask("pwd"), first.ask('echo "$PATH"'), home)
            terminals[name].play(read_session(text), stay=name != FIRST)
        else:
            assert title, f"a block that the test does not run:\n{text}"
            Path(first.ask("pwd"), title).write_text(text, encoding="utf-8")
