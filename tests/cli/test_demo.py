import io
import subprocess
import sys

import pytest

from operations.cli import main
from operations.cli.demo import demo


async def test_the_demo_shows_every_kind_of_call_on_one_screen() -> None:
    out = io.StringIO()

    await demo(out)

    text = out.getvalue()
    for word in (
        '"source":"local"',
        "VALIDATION_ERROR",
        "ACCESS_DENIED",
        "TASK_NOT_FOUND",
        "subscribe",
    ):
        assert word in text
    assert len(text.splitlines()) < 50
    assert "\033" not in text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


async def test_the_demo_has_colour_where_a_person_looks() -> None:
    out = Terminal()

    await demo(out)

    assert "\033[" in out.getvalue()


def test_the_command_runs_the_demo() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "operations", "demo"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert "envelope" in done.stdout


@pytest.mark.parametrize(("arguments", "code"), [(["--help"], 0), ([], 2), (["nonsense"], 2)])
def test_anything_else_shows_the_usage(
    arguments: list[str], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == code
    assert "usage" in "".join(capsys.readouterr())
