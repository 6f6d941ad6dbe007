"""Check the archives of a release, and write its checksums, software bill of materials and provenance.

    python scripts/release_files.py FOLDER COMMIT

`FOLDER` contains the wheel and the sdist. The bill of materials (CycloneDX) lists the packages of requirements.lock:
those of all extras. It is validated against the schema of CycloneDX. The provenance (SLSA) is not signed: sign it
where the release is published.
"""

import hashlib
import json
import re
import sys
import tarfile
import zipfile
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, metadata, version
from pathlib import Path
from typing import Any

from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = Path(__file__).resolve().parent.parent
NAME = "alkdev-operations"
IN_WHEEL = {"operations/__init__.py", "operations/py.typed"}
IN_SDIST = {
    "LICENSE",
    "README.md",
    "pyproject.toml",
    "requirements.lock",
    "src/operations/py.typed",
    "tests/conftest.py",
}
UNWANTED = re.compile(
    r"(^|/)(__pycache__|\.venv[^/]*|\.matrix|\.git|node_modules|dist|build)(/|$)|\.(pyc|key|pem)$"
)
PINNED = re.compile(r"^([A-Za-z0-9._-]+)(?:\[[^\]]*\])?==([^ ;\\]+)", re.MULTILINE)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _purl(name: str, number: str) -> str:
    return f"pkg:pypi/{name}@{number}"


def locked() -> dict[str, str]:
    """Return the pinned version of every package that all extras install."""
    text = (PROJECT / "requirements.lock").read_text(encoding="utf-8")
    return {canonicalize_name(name): number for name, number in PINNED.findall(text)}


def _component(name: str, number: str) -> dict[str, Any]:
    component: dict[str, Any] = {
        "type": "library",
        "bom-ref": _purl(name, number),
        "name": name,
        "version": number,
        "purl": _purl(name, number),
    }
    try:
        expression = metadata(name).get("License-Expression")
    except PackageNotFoundError:
        expression = None
    if expression:
        component["licenses"] = [{"expression": expression}]
    return component


def _requires(name: str, known: dict[str, str]) -> list[str]:
    """Return the references of the packages that a package requires on this machine."""
    try:
        texts: list[str] = metadata(name).get_all("Requires-Dist") or []
    except PackageNotFoundError:
        return []
    names = set[str]()
    for text in texts:
        requirement = Requirement(text)
        optional = requirement.marker is not None and "extra" in str(requirement.marker)
        if name == NAME or not optional:
            names.add(canonicalize_name(requirement.name))
    return sorted(_purl(each, known[each]) for each in names & set(known))


def bill_of_materials(wheel: Path, made: datetime) -> dict[str, Any]:
    """Return the CycloneDX document for a wheel."""
    known, number = locked(), wheel.name.split("-")[1]
    root = {**_component(NAME, number), "hashes": [{"alg": "SHA-256", "content": _digest(wheel)}]}
    components = [_component(name, known[name]) for name in sorted(known)]
    graph = [{"ref": root["purl"], "dependsOn": _requires(NAME, known)}]
    graph += [
        {"ref": _purl(name, known[name]), "dependsOn": _requires(name, known)}
        for name in sorted(known)
    ]
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"timestamp": made.isoformat(), "component": root},
        "components": components,
        "dependencies": graph,
    }


def check_archives(wheel: Path, sdist: Path) -> list[str]:
    """Return what is missing from the archives, and what they contain but should not."""
    with zipfile.ZipFile(wheel) as opened:
        in_wheel = set(opened.namelist())
    with tarfile.open(sdist) as opened:
        in_sdist = {name.partition("/")[2] for name in opened.getnames()}
    problems = [f"{wheel.name}: {name} is missing" for name in sorted(IN_WHEEL - in_wheel)]
    problems += [f"{sdist.name}: {name} is missing" for name in sorted(IN_SDIST - in_sdist)]
    for archive, names in ((wheel, in_wheel), (sdist, in_sdist)):
        problems += [
            f"{archive.name}: {each} does not belong here"
            for each in names
            if UNWANTED.search(each)
        ]
    info = f"alkdev_operations-{wheel.name.split('-')[1]}.dist-info/"
    return problems + [
        f"{wheel.name}: {name} does not belong here"
        for name in sorted(in_wheel)
        if not name.startswith(("operations/", info))
    ]


def check_bill(text: str) -> list[str]:
    """Return the violations of the CycloneDX schema."""
    errors = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text, all_errors=True) or ()
    return [f"sbom.cdx.json: {error.data.message}" for error in errors]


def provenance(files: list[Path], commit: str, made: datetime) -> dict[str, Any]:
    """Return the in-toto statement about the sources and tools from which `files` were built."""
    tools = ["hatchling", "packaging"]
    sources: list[dict[str, Any]] = [
        {"name": "source", "digest": {"gitCommit": commit}},
        {"name": "requirements.lock", "digest": {"sha256": _digest(PROJECT / "requirements.lock")}},
    ]
    sources += [{"uri": _purl(tool, version(tool))} for tool in tools]
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": file.name, "digest": {"sha256": _digest(file)}} for file in files],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": f"urn:{NAME}:scripts-release:1",
                "externalParameters": {"commit": commit},
                "internalParameters": {"python": sys.version.split()[0]},
                "resolvedDependencies": sources,
            },
            "runDetails": {
                "builder": {"id": f"urn:{NAME}:scripts-release"},
                "metadata": {"finishedOn": made.isoformat()},
            },
        },
    }


def main(folder: Path, commit: str) -> None:
    """Check the wheel and the sdist, and write the files beside them."""
    made = datetime.now(UTC).replace(microsecond=0)
    (wheel,) = folder.glob("*.whl")
    (sdist,) = folder.glob("*.tar.gz")
    files = [wheel, sdist]
    documents = {
        "sbom.cdx.json": bill_of_materials(wheel, made),
        "provenance.json": provenance(files, commit, made),
    }
    texts = {name: json.dumps(document, indent=2) + "\n" for name, document in documents.items()}
    if problems := check_archives(wheel, sdist) + check_bill(texts["sbom.cdx.json"]):
        sys.exit("\n".join(f"release: {problem}" for problem in problems))
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    files += [folder / name for name in documents]
    sums = "".join(f"{_digest(file)}  {file.name}\n" for file in sorted(files))
    (folder / "SHA256SUMS").write_text(sums, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
