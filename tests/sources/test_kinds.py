"""Kinds of sources: those of other packages are kinds like our own."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from tests.limits import scaled

from operations.config import ConfigError, parse_config
from operations.sources.kinds import BUILT_IN, kinds

PACKAGE = Path(__file__).parent / "extension"

RUN = """
import asyncio, json, sys
from operations.hub import open_hub

async def main():
    async with open_hub("operations.toml") as hub:
        found = await hub.registry.execute("stock.find", {"item": "tea"})
        print(json.dumps({
            "sources": [each.label for each in hub.sources], "state": hub.sources[0].state,
            "data": found.data, "problem": hub.sources[0].problem,
        }))

asyncio.run(main())
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a config, and with the package of an extension installed from its wheel in `site`."""
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path / "dist")],
        cwd=PACKAGE, check=True, capture_output=True, timeout=scaled(60),
    )  # fmt: skip
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    (tmp_path / "operations.toml").write_text('[csv.stock]\nfile = "stock.csv"\n')
    (tmp_path / "stock.csv").write_text("item,count\ntea,3\nmilk,1\n")
    return tmp_path


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, cwd=folder, env={"PYTHONPATH": str(folder / "site"), "HOME": str(folder)},
        capture_output=True, text=True, check=False, timeout=scaled(60),
    )  # fmt: skip


def test_a_package_adds_a_kind_of_source(folder: Path) -> None:
    done = run(folder, sys.executable, "-c", RUN)

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "sources": ["csv:stock"],
        "state": "connected",
        "data": [{"item": "tea", "count": "3"}],
        "problem": None,
    }


def test_the_commands_know_the_kind_of_a_package(folder: Path) -> None:
    listed = run(folder, sys.executable, "-m", "operations", "list", "--source", "csv", "--json")
    examined = run(folder, sys.executable, "-m", "operations", "doctor")

    assert [each["id"] for each in json.loads(listed.stdout)] == ["stock.find"]
    assert "csv:stock" in examined.stdout


def test_import_previews_the_kind_of_a_package(folder: Path) -> None:
    previewed = run(
        folder, sys.executable, "-m", "operations", "import", "stock.csv", "--kind", "csv"
    )
    unknown = run(
        folder, sys.executable, "-m", "operations", "import", "stock.csv", "--kind", "cvs"
    )

    assert previewed.returncode == 0, previewed.stderr
    assert '[csv.stock]\nfile = "stock.csv"' in previewed.stdout
    assert "there is no kind 'cvs'; known: broker, mcp, openapi, local" in unknown.stderr


TOOLS = """
import asyncio, json
from operations.agents import Toolbox
from operations.hub import open_hub

async def main():
    async with open_hub("operations.toml") as hub:
        tools = Toolbox(hub.registry)
        answer = await tools.run('stock__find {"item": "milk"}', "lines")
        print(json.dumps([tools.tools("lines")[0], answer]))

asyncio.run(main())
"""


def test_a_package_adds_the_form_of_a_provider(folder: Path) -> None:
    done = run(folder, sys.executable, "-c", TOOLS)
    exported = run(
        folder, sys.executable, "-m", "operations", "export", "lines", "stock.*", "--json"
    )
    unknown = run(folder, sys.executable, "-m", "operations", "export", "lnies")

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [
        {"line": "stock__find(item, count)"},
        {"line": 'stock__find = [{"item":"milk","count":"1"}]'},
    ]
    assert json.loads(exported.stdout)["result"] == [{"line": "stock__find(item, count)"}]
    assert "there is no format 'lnies'" in unknown.stderr


STATE = """
import asyncio
from operations.hub import open_hub

async def main():
    async with open_hub("operations.toml") as hub:
        await hub.registry.authority.store.swap("table.key", None, b"value")

asyncio.run(main())
"""


def test_a_package_adds_a_store(folder: Path) -> None:
    config = folder / "operations.toml"
    config.write_text('[state]\nurl = "folder:kept"\n')
    done = run(folder, sys.executable, "-c", STATE)
    config.write_text('[state]\nurl = "fodler:kept"\n')
    unknown = run(folder, sys.executable, "-m", "operations", "doctor")

    assert done.returncode == 0, done.stderr
    assert (folder / "kept" / "table.key").read_bytes() == b"value"
    assert (
        "operations.toml:2: state.url cannot be used: there is no store 'fodler'" in unknown.stdout
    )


def test_errors_of_its_table_name_line_and_key(folder: Path) -> None:
    (folder / "operations.toml").write_text('[csv.stock]\nfile = "stock.txt"\ncolour = "red"\n')
    unknown = run(folder, sys.executable, "-m", "operations", "list")
    (folder / "operations.toml").write_text('[csv.stock]\nfile = "stock.txt"\n')
    rejected = run(folder, sys.executable, "-m", "operations", "list")

    assert "operations.toml:3: csv.stock.colour is not a known key" in unknown.stderr
    assert "operations.toml:2: csv.stock.file must be a .csv file." in rejected.stderr


def test_a_table_without_a_kind_is_an_unknown_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="csv is not a known key"):
        parse_config('[csv.stock]\nfile = "a.csv"\n', tmp_path / "operations.toml")


def test_our_own_kinds_are_found_by_their_tables() -> None:
    assert [each.table for each in kinds()] == [*BUILT_IN]


RECORD = """
import asyncio, json
from operations import CallError
from operations.hub import open_hub
from operations.hub.operations import readiness

async def main():
    async with open_hub("operations.toml") as hub:
        await hub.registry.execute("stock.find", {"item": "tea"})
        (hub.file.folder / "kept").rename(hub.file.folder / "gone")
        try:
            await hub.registry.execute("stock.find", {"item": "tea"})
        except CallError as error:
            print(json.dumps([error.code, await readiness(hub)]))

asyncio.run(main())
"""


@pytest.mark.requirement("R46")
def test_a_package_adds_a_sink_that_rejects_what_it_cannot_record(folder: Path) -> None:
    config = folder / "operations.toml"
    (folder / "kept").mkdir()
    config.write_text(config.read_text() + '[record.count]\nfile = "kept/calls"\n')
    done = run(folder, sys.executable, "-c", RECORD)
    config.write_text("[record.cuont]\nfile = 1\n[record.count]\nfiel = 1\n")
    unknown = run(folder, sys.executable, "-m", "operations", "doctor")

    assert done.returncode == 0, done.stderr
    code, ready = json.loads(done.stdout)
    assert (code, ready["disconnected"]) == ("UNAVAILABLE", ["count"])
    lines = (folder / "gone" / "calls").read_text().splitlines()
    assert lines == ["begin stock.find 64", "end stock.find None"]
    assert 'record.cuont is not a known key. Did you mean "count"?' in unknown.stdout
    assert 'record.count.fiel is not a known key. Did you mean "file"?' in unknown.stdout
