"""The table of limits names every limit."""

import re
from dataclasses import fields
from pathlib import Path

from operations.front.limits import Limits

SERVING = Path(__file__).parents[2] / "docs" / "serving.md"


def test_the_table_of_limits_names_every_limit() -> None:
    section = SERVING.read_text(encoding="utf-8").partition("## Limits")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row) if name != "Limits"]

    assert sorted(named) == sorted(field.name for field in fields(Limits))
