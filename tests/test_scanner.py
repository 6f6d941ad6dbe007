import re
import sys
from collections.abc import Iterator
from pathlib import Path
from zipfile import ZipFile

import pytest

from operations import OperationRegistry, scan_operations

GOOD = """
from operations import Operation, OperationSpec, OperationType, operation

@operation("scan.{name}")
async def run(n: int) -> int:
    return n + 1

made = Operation(OperationSpec(name="{name}.made", namespace="scan", type=OperationType.QUERY), run)
again = made
"""
SPEC = """
from operations import OperationSpec, OperationType
operation = OperationSpec(name="declared", namespace="scan", type=OperationType.QUERY)
"""
SPEC_WITH_HANDLER = """
operation = {"name": "handled", "namespace": "scan", "version": "1", "type": "query",
             "description": "", "inputSchema": {}, "outputSchema": {}, "accessControl": {}}
async def handler(input, context):
    return "handled"
"""


PROXY = """
class Proxy:
    def __getattr__(self, name):
        raise RuntimeError("outside of a request")
proxy = Proxy()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    files = {
        "good.py": GOOD.format(name="good"),
        "deep/er/nested.py": "from ...shared import VALUE\n" + GOOD.format(name="nested"),
        "shared.py": "VALUE = 1\nfrom .good import run",
        "spec.py": SPEC,
        "handled.py": SPEC_WITH_HANDLER,
        "broken_syntax.py": "def (",
        "broken_import.py": "import no_such_module_anywhere",
        "exits.py": "raise SystemExit(3)",
        "bad_spec.py": "operation = {'name': 'x'}",
        "twin.py": GOOD.format(name="good"),
        "not-a-module.py": "raise RuntimeError('never imported')",
        ".hidden/secret.py": "raise RuntimeError('never imported')",
        "__pycache__/cached.py": "raise RuntimeError('never imported')",
        "__init__.py": "",
        "empty.py": "",
        "__main__.py": "raise RuntimeError('never run')",
        "proxy.py": PROXY,
        "exiting/__init__.py": "raise SystemExit(3)",
        "exiting/inner.py": "",
    }
    for name, text in files.items():
        path = tmp_path / "ops" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "ops"


@pytest.fixture(autouse=True)
def forget_modules() -> Iterator[None]:
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


async def test_a_folder_is_scanned_to_the_end(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = scan_operations(folder)

    assert {known.spec.id for known in found.operations} == {
        "scan.good",
        "scan.good.made",
        "scan.nested",
        "scan.nested.made",
        "scan.handled",
    }
    assert [known.id for known in found.specs] == ["scan.declared"]
    assert len(found) == 6
    skipped = {Path(item.where).name: item.reason for item in found.skipped}
    assert skipped.keys() == {
        "proxy.py: proxy",
        "__init__.py",
        "inner.py",
        "broken_syntax.py",
        "broken_import.py",
        "exits.py",
        "bad_spec.py",
        "twin.py",
        "not-a-module.py",
    }
    assert "no_such_module_anywhere" in skipped["broken_import.py"]
    assert "scan.good" in skipped["twin.py"]
    assert "broken_syntax.py" in caplog.text
    registry = OperationRegistry()
    registry.register_all(found)
    assert (await registry.execute("scan.good", {"n": 1})).data == 2
    assert (await registry.execute("scan.handled")).data == "handled"


def test_one_file_can_be_scanned(folder: Path) -> None:
    found = scan_operations(str(folder / "good.py"))

    assert [known.spec.id for known in found.operations] == ["scan.good", "scan.good.made"]


def test_a_package_can_be_scanned_by_name_and_as_a_module(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(folder.parent))

    by_name = scan_operations("ops")

    assert {known.spec.id for known in by_name.operations} >= {"scan.good", "scan.handled"}
    assert scan_operations(sys.modules["ops"]).operations == by_name.operations
    assert scan_operations("ops.good").operations[0].spec.id == "scan.good"


@pytest.mark.parametrize("source", ["no.such.package", "no/such/folder", ".x"])
def test_a_missing_module_is_an_error(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    with pytest.raises(FileNotFoundError, match="neither"):
        scan_operations(source)


def test_an_interrupted_scan_stops(folder: Path) -> None:
    (folder / "aaa.py").write_text("raise KeyboardInterrupt")

    with pytest.raises(KeyboardInterrupt):
        scan_operations(folder)


def test_importing_a_neighbour_by_its_bare_name_raises_with_advice(tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_wants.py").write_text("VALUE = 1")
    (tmp_path / "wants.py").write_text("from neighbour_of_wants import VALUE")
    (tmp_path / "lacks.py").write_text("import no_such_module_anywhere")

    reasons = {Path(each.where).stem: each.reason for each in scan_operations(tmp_path).skipped}

    assert "`from . import neighbour_of_wants`" in reasons["wants"]
    assert "`from . import" not in reasons["lacks"]


METHODS = """
from operations import operation

class Service:
    @operation("scan.method")
    async def method(self, n: int) -> int:
        return n

    @staticmethod
    @operation("scan.static")
    async def static(n: int) -> int:
        return n

    @classmethod
    @operation("scan.class")
    async def of_class(cls, n: int) -> int:
        return n

@operation("scan.function")
async def function(n: int) -> int:
    return n
"""


def test_methods_are_not_found_and_reported(tmp_path: Path) -> None:
    (tmp_path / "methods.py").write_text(METHODS)
    (tmp_path / "user.py").write_text("from .methods import Service")

    found = scan_operations(tmp_path)

    assert [each.spec.id for each in found.operations] == ["scan.function"]
    assert [each.where.rpartition(": ")[2] for each in found.skipped] == [
        "Service.method",
        "Service.static",
        "Service.of_class",
    ]
    assert all(re.search("is a method|is in a class", each.reason) for each in found.skipped)


def test_an_empty_name_is_nothing_to_scan() -> None:
    with pytest.raises(FileNotFoundError, match="name a folder"):
        scan_operations("")


SPECS = """
from operations import OperationSpec, OperationType

def spec(name):
    return OperationSpec(name=name, namespace="scan", type=OperationType.QUERY)

create = spec("create")
async def create_handler(input, context):
    return "created"

delete = {"name": "delete", "namespace": "scan", "type": "mutation"}
whole = {"name": "whole", "namespace": "scan", "type": "query", "handler": lambda input, context: "whole"}
wrong = {"name": "wrong", "namespace": "no namespace", "type": "query"}
settings = {"name": "not a spec"}
_private = spec("private")
"""


async def test_specs_are_found_under_any_public_name(tmp_path: Path) -> None:
    (tmp_path / "specs.py").write_text(SPECS)
    (tmp_path / "only.py").write_text(SPEC_WITH_HANDLER.replace("operation =", "listing ="))
    (tmp_path / "other.py").write_text("from .specs import create, delete")

    found = scan_operations(tmp_path)

    assert {known.spec.id for known in found.operations} == {
        "scan.create",
        "scan.whole",
        "scan.handled",
    }
    assert [known.id for known in found.specs] == ["scan.delete"]
    (skipped,) = found.skipped
    assert "`wrong` is not a spec" in skipped.reason
    registry = OperationRegistry()
    registry.register_all(found)
    assert (await registry.execute("scan.create")).data == "created"
    assert (await registry.execute("scan.whole")).data == "whole"
    assert (await registry.execute("scan.handled")).data == "handled"


FILES: dict[str, str | bytes | list[str]] = {
    "app/ops": ["good.py", "deep/", "shared.py", "broken.py", "notes.txt", "package/"],
    "app/ops/good.py": GOOD.format(name="good"),
    "app/ops/shared.py": b"VALUE = 1",
    "app/ops/broken.py": "def (",
    "app/ops/deep": ["er/"],
    "app/ops/deep/er": ["nested.py"],
    "app/ops/deep/er/nested.py": "from ...shared import VALUE\n" + GOOD.format(name="nested"),
    "app/ops/package": ["__init__.py", "inner.py"],
    "app/ops/package/__init__.py": "from .inner import operation",
    "app/ops/package/inner.py": SPEC,
}


async def test_files_can_be_read_from_elsewhere() -> None:
    found = scan_operations("app/ops", read=FILES.__getitem__)

    assert {known.spec.id for known in found.operations} == {
        "scan.good",
        "scan.good.made",
        "scan.nested",
        "scan.nested.made",
    }
    assert [known.id for known in found.specs] == ["scan.declared"]
    assert [item.where for item in found.skipped] == ["app/ops/broken.py"]
    registry = OperationRegistry()
    registry.register_all(found)
    assert (await registry.execute("scan.nested", {"n": 1})).data == 2


def test_one_file_can_be_read_from_elsewhere() -> None:
    found = scan_operations("app/ops/good.py", read=FILES.__getitem__)

    assert [known.spec.id for known in found.operations] == ["scan.good", "scan.good.made"]
    with pytest.raises(FileNotFoundError, match="app/nowhere"):
        scan_operations("app/nowhere", read=FILES.__getitem__)


@pytest.mark.parametrize(("root", "file"), [(".", "a.py"), ("/", "/a.py"), ("ops", "ops/a.py")])
def test_files_of_any_folder_can_be_read_from_elsewhere(root: str, file: str) -> None:
    files: dict[str, str | list[str]] = {root: ["a.py"], file: GOOD.format(name="a")}
    for source in (root, file):
        found = scan_operations(source, read=files.__getitem__)
        assert [known.spec.id for known in found.operations] == ["scan.a", "scan.a.made"]
        assert not found.skipped


def test_two_sources_do_not_share_modules() -> None:
    for name in ("one", "two"):
        files: dict[str, str | list[str]] = {"ops": ["a.py"], "ops/a.py": GOOD.format(name=name)}
        found = scan_operations("ops", read=files.__getitem__)
        assert found.operations[0].spec.id == f"scan.{name}"


def test_a_package_in_an_archive_is_scanned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ZipFile(tmp_path / "app.zip", "w") as archive:
        archive.writestr("scan_archive/__init__.py", "")
        archive.writestr("scan_archive/deep/__init__.py", "")
        archive.writestr("scan_archive/deep/nested.py", GOOD.format(name="nested"))
    monkeypatch.syspath_prepend(str(tmp_path / "app.zip"))

    found = scan_operations("scan_archive")

    assert [known.spec.id for known in found.operations] == ["scan.nested", "scan.nested.made"]


def test_a_module_with_the_name_of_the_library_is_rejected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code = "from operations import operation\n\n@operation('a.b')\ndef b() -> None: ..."
    (tmp_path / "operations.py").write_text(code, encoding="utf-8")

    with pytest.raises(FileNotFoundError, match="rename your own module"):
        scan_operations("operations")
    assert [each.spec.id for each in scan_operations("operations.py").operations] == ["a.b"]
