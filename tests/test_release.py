"""The output of `scripts/release`: the archives, their contents, and the accompanying documents."""

import hashlib
import json
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_bytes
from pathlib import Path
from typing import Any

import pytest
from tests.conftest import PROJECT
from tests.limits import scaled
from tests.support import script

import operations

SOURCES = PROJECT / "src"
VERSION = operations.__version__


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a release, built once."""
    folder = tmp_path_factory.mktemp("release")
    built = subprocess.run(
        [PROJECT / "scripts" / "release", "--draft", folder],
        capture_output=True, text=True, timeout=scaled(200), check=False,
    )  # fmt: skip
    assert built.returncode == 0, built.stderr
    return folder


def _wheel(release: Path) -> zipfile.ZipFile:
    (path,) = release.glob("*.whl")
    return zipfile.ZipFile(path)


def test_the_wheel_contains_the_package_and_nothing_else(release: Path) -> None:
    files = [path for path in (SOURCES / "operations").rglob("*") if path.is_file()]
    expected = {
        path.relative_to(SOURCES).as_posix() for path in files if "__pycache__" not in path.parts
    }
    with _wheel(release) as wheel:
        names = set(wheel.namelist())
    info = f"alkdev_operations-{VERSION}.dist-info/"

    assert {name for name in names if not name.startswith(info)} == expected
    assert "operations/py.typed" in names
    assert {"LICENSE", "LICENSE-APACHE", "LICENSE-MIT"} <= {
        name.rpartition("/")[2] for name in names
    }


def test_the_metadata_is_that_of_the_project(release: Path) -> None:
    project = tomllib.loads((PROJECT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    with _wheel(release) as wheel:
        metadata = message_from_bytes(wheel.read(f"alkdev_operations-{VERSION}.dist-info/METADATA"))

    assert metadata["Version"] == VERSION
    assert metadata["Requires-Python"] == project["requires-python"]
    assert set(metadata.get_all("Provides-Extra") or ()) == set(project["optional-dependencies"])
    description = str(metadata.get_payload())
    assert "pip install 'alkdev-operations[all]'" in description
    assert "](docs/" not in description, "links that work only in the repository"
    requirements = " ".join(metadata.get_all("Requires-Dist") or ())
    for capped in ("mcp<3,", "nats-py[nkeys]<3,", "uvicorn<1,"):
        assert capped in requirements


def test_an_installed_wheel_runs(release: Path, tmp_path: Path) -> None:
    with _wheel(release) as wheel:
        wheel.extractall(tmp_path)  # noqa: S202 - built above
    ran = subprocess.run(
        [sys.executable, "-m", "operations", "--version"],
        cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True,
        timeout=scaled(150), check=False,
    )  # fmt: skip

    assert ran.stdout.strip().endswith(VERSION), ran.stderr


def test_the_sdist_contains_its_build_and_tests(release: Path) -> None:
    (path,) = release.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}

    for needed in ("src/operations/__init__.py", "tests/conftest.py", "scripts/test", "Makefile"):
        assert needed in names
    for needed in ("README.md", "CHANGELOG.md", "LICENSE", "pyproject.toml", "requirements.lock"):
        assert needed in names
    assert not [name for name in names if "__pycache__" in name or ".venv" in name]


def _document(release: Path, name: str) -> Any:
    return json.loads((release / name).read_text(encoding="utf-8"))


def test_the_bill_of_materials_lists_every_locked_package(release: Path) -> None:
    bill = _document(release, "sbom.cdx.json")
    lock = (PROJECT / "requirements.lock").read_text(encoding="utf-8")

    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    assert bill["metadata"]["component"]["version"] == VERSION
    names = {component["name"]: component["version"] for component in bill["components"]}
    assert {"aiohttp", "jsonschema-rs", "mcp", "msgspec", "uvicorn"} <= set(names)
    for name, number in names.items():
        assert f"{name}=={number}" in lock or f"=={number}" in lock
    known = {component["purl"] for component in bill["components"]}
    edges = {edge["ref"]: edge["dependsOn"] for edge in bill["dependencies"]}
    assert set(edges) - known == {f"pkg:pypi/alkdev-operations@{VERSION}"}
    assert all(set(targets) <= known for targets in edges.values())
    assert edges[f"pkg:pypi/alkdev-operations@{VERSION}"]


def test_a_bill_of_materials_or_an_archive_with_faults_is_rejected(
    release: Path, tmp_path: Path
) -> None:
    files = script("release_files")
    bill = _document(release, "sbom.cdx.json")
    del bill["components"][0]["name"]
    (wheel,), (sdist,) = release.glob("*.whl"), release.glob("*.tar.gz")
    spoiled = tmp_path / wheel.name
    with zipfile.ZipFile(spoiled, "w") as archive:
        archive.writestr("operations/__init__.py", "")
        archive.writestr("tests/secret.pem", "")

    assert files.check_bill(json.dumps(bill)) == ["sbom.cdx.json: 'name' is a required property"]
    assert files.check_archives(wheel, sdist) == []
    assert set(files.check_archives(spoiled, sdist)) == {
        f"{wheel.name}: operations/py.typed is missing",
        f"{wheel.name}: tests/secret.pem does not belong here",
    }


def test_checksums_and_provenance_name_the_archives(release: Path) -> None:
    archives = [*release.glob("*.whl"), *release.glob("*.tar.gz")]
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in archives}
    statement = _document(release, "provenance.json")
    sums = (release / "SHA256SUMS").read_text(encoding="utf-8")

    subjects = {each["name"]: each["digest"]["sha256"] for each in statement["subject"]}
    assert subjects == digests
    for name, digest in digests.items():
        assert f"{digest}  {name}\n" in sums
    assert statement["predicateType"] == "https://slsa.dev/provenance/v1"
