"""Keep the measured numbers of the documentation equal to docs/numbers.json.

    python3 scripts/doc_numbers.py            write the numbers into README.md and docs/
    python3 scripts/doc_numbers.py --check    list what differs instead, and exit with 1 if anything does
    python3 scripts/doc_numbers.py --age      list the tables whose measured code has changed since, and exit with 1
    python3 scripts/doc_numbers.py --admit    let the pages say so for these tables, until they are measured again

`scripts/bench --record` and `scripts/measure --record` write their tables into docs/numbers.json. A page shows a whole
table between `<!--table:TITLE-->` and `<!---->`, and one number between `<!--number:NAME-->` and `<!---->`. `names` in
the file gives the table, row, column and format of each NAME, and the row to divide by for a ratio. Decision records
keep the numbers on which the decision was based.
"""

import json
import os
import platform
import re
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parent))
import measured_code

PROJECT = Path(__file__).resolve().parent.parent
FILE = PROJECT / "docs" / "numbers.json"
RECORDING = "RECORD_NUMBERS"
"""The environment variable that makes benchmarks record their tables."""

_MARKED = re.compile(r"<!--(table|number):(.+?)-->(.*?)<!---->", re.DOTALL)

Rows = dict[str, dict[str, float | int | str | None]]


def record(command: str, title: str, rows: Rows) -> None:
    """Write one table into docs/numbers.json if `RECORD_NUMBERS` is set."""
    if not os.environ.get(RECORDING):
        return
    data = read()
    data["tables"][title] = {
        "command": command,
        "date": datetime.now(UTC).date().isoformat(),
        "code": measured_code.code_of(command),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
        "rows": {
            name: {column: _rounded(value) for column, value in row.items()}
            for name, row in rows.items()
        },
    }
    FILE.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read() -> dict[str, Any]:
    """Return the content of docs/numbers.json."""
    data: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return data


def _rounded(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) and abs(value) < 1000 else value


def shown(value: Any) -> str:
    """Return a number as tables show it."""
    if value is None:
        return ""
    if isinstance(value, float):
        digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2
        return f"{value:,.{digits}f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def table(data: dict[str, Any], title: str) -> str:
    """Return a table in Markdown, with the command, the date and the machine below it."""
    made = data["tables"][title]
    columns = list(dict.fromkeys(column for row in made["rows"].values() for column in row))
    lines = [
        f"| {title.partition(': ')[2]} | {' | '.join(columns)} |",
        f"|---{'|--:' * len(columns)}|",
    ]
    lines += [
        f"| {name} | {' | '.join(shown(row.get(column)) for column in columns)} |"
        for name, row in made["rows"].items()
    ]
    source = f"`{made['command']}`, {made['date']}, {made['machine']}"
    if made.get("changed"):
        source += "; the measured code has changed since"
    return "\n\n" + "\n".join(lines) + f"\n\n*{source}*\n\n"


def number(data: dict[str, Any], name: str) -> str:
    """Return the number that `names` describes: a cell of a table, divided by that of another row if one is named."""
    title, row, column, form, *base = data["names"][name]
    rows = data["tables"][title]["rows"]
    value = rows[row][column] / rows[base[0]][column] if base else rows[row][column]
    return format(value, form) if form else shown(value)


def fill(text: str, data: dict[str, Any], used: set[str]) -> str:
    """Return the text with every marked table and number replaced; add their names to `used`."""

    def replace(found: re.Match[str]) -> str:
        kind, name, _ = found.groups()
        used.add(name)
        content = table(data, name) if kind == "table" else number(data, name)
        return f"<!--{kind}:{name}-->{content}<!---->"

    return _MARKED.sub(replace, text)


def main(check: bool) -> list[str]:
    """Fill all pages, or return what is wrong with them."""
    data, used = read(), set[str]()
    problems: list[str] = []
    for page in [PROJECT / "README.md", *sorted((PROJECT / "docs").glob("*.md"))]:
        text = page.read_text(encoding="utf-8")
        try:
            filled = fill(text, data, used)
        except KeyError as error:
            problems.append(f"{page.name}: docs/numbers.json has no {error}")
            continue
        if filled != text and check:
            problems.append(
                f"{page.name} differs from docs/numbers.json: run scripts/doc_numbers.py"
            )
        elif filled != text:
            page.write_text(filled, encoding="utf-8")
    unused = {*data["tables"], *data["names"]} - used
    problems += [f"docs/numbers.json: no page shows {name!r}" for name in sorted(unused)]
    return problems


def aged() -> list[str]:
    """Return a problem for each table whose measured code has changed by more than words."""
    advice = "measure it again with --record, or run scripts/doc_numbers.py --admit"
    return [
        f"docs/numbers.json: the code of {title!r} has changed since: {advice}"
        for title in measured_code.outdated(read()["tables"])
    ]


def admit() -> None:
    """Mark the tables whose measured code has changed, so that the pages say it."""
    data = read()
    for title in measured_code.outdated(data["tables"]):
        data["tables"][title]["changed"] = True
    FILE.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if "--admit" in sys.argv[1:]:
        admit()
    found = aged() if "--age" in sys.argv[1:] else main(check="--check" in sys.argv[1:])
    for problem in found:
        print(problem, file=sys.stderr)
    sys.exit(bool(found))
