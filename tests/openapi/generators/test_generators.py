"""What linters say about exported documents, and the clients that generators make: checked by type, and called."""

import asyncio
import fcntl
import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.limits import scaled
from tests.node_packages import install_node_packages
from tests.openapi.generators.registry import build
from tests.servers import installer_environment

from operations.openapi import to_openapi
from operations.server import create_app
from operations.server.http11.running import running

HERE = Path(__file__).parent
PROGRAMS = HERE / "node_modules" / ".bin"
PYTHON = HERE / ".venv" / "bin" / "python"
PACKAGES = ["openapi-python-client==0.29.1"]

pytestmark = pytest.mark.slow

CALLS_IN_PYTHON = """
import json
import sys

from client import Client
from client.api.pets import pets_any, pets_describe, pets_drop, pets_photo
from client.api.tree import tree_add, tree_get_get, tree_pair, tree_search, tree_search_get
from client.models import (
    Cat, CatKind, Color, Error, Found, Node, PetsAnyBody, PetsDescribeBody, PetsDropBody, PetsPhotoBody, TreeAddBody,
    TreePairBody, TreeSearchBody,
)

found: dict[str, object] = {}
with Client(base_url=sys.argv[1]) as client:
    node = tree_get_get.sync(client=client, id=1, deep=True)
    assert isinstance(node, Node)
    found["get"] = node.to_dict()
    node = tree_add.sync(client=client, body=TreeAddBody(node=Node(3, [Node(4, [])])))
    assert isinstance(node, Node)
    found["add"] = node.to_dict()
    pair = tree_pair.sync(client=client, body=TreePairBody([1, "a"]))
    assert isinstance(pair, list)
    found["pair"] = pair
    near = json.dumps(Node(5, []).to_dict())
    by_query = tree_search_get.sync(
        client=client, colors=[Color.RED, Color.GREEN], near=near, matrix="[[1, 2], []]", limit=3
    )
    assert isinstance(by_query, Found)
    found["query"] = by_query.to_dict()
    body = TreeSearchBody(colors=[Color.GREEN], near=Node(6, []), mixed="x")
    by_body = tree_search.sync(client=client, body=body)
    assert isinstance(by_body, Found)
    found["body"] = by_body.to_dict()
    pet = pets_describe.sync(client=client, body=PetsDescribeBody(Cat(CatKind.CAT, 9)))
    assert isinstance(pet, Cat)
    found["pet"] = pet.to_dict()
    photo = pets_photo.sync(client=client, body=PetsPhotoBody("name"))
    assert photo is not None and not isinstance(photo, Error)
    found["photo"] = photo.payload.read().decode()
    found["any"] = pets_any.sync(client=client, body=PetsAnyBody([1, None]))
    found["drop"] = pets_drop.sync_detailed(client=client, body=PetsDropBody(1)).status_code
    refused = pets_drop.sync(client=client, body=PetsDropBody("none"))  # type: ignore[arg-type]
    assert isinstance(refused, Error)
    found["error"] = refused.code
print(json.dumps(found))
"""

CALLS_IN_TYPESCRIPT = """
import { client } from './client/client.gen';
import {
  petsAny, petsDescribe, petsDrop, petsPhoto, petsWatchGet, treeAdd, treeGetGet, treePair, treeSearch, treeSearchGet,
} from './client';
import type { Cat, Dog, Found, Node } from './client';

const needed = <T>(value: T | undefined): T => {
  if (value === undefined) throw new Error('the call failed');
  return value;
};

const main = async (): Promise<void> => {
  client.setConfig({ baseUrl: process.argv[2] });
  const found: Record<string, unknown> = {};
  const node: Node = needed((await treeGetGet({ query: { id: 1, deep: true } })).data);
  found.get = node;
  found.add = (await treeAdd({ body: { node: { value: 3, children: [{ value: 4, children: [] }] } } })).data;
  const pair: [string, number] = needed((await treePair({ body: { point: [1, 'a'] } })).data);
  found.pair = pair;
  const near = JSON.stringify({ value: 5, children: [] });
  const byQuery: Found = needed((await treeSearchGet({
    query: { colors: ['red', 'green'], near, matrix: '[[1, 2], []]', limit: 3 },
  })).data);
  found.query = byQuery;
  found.body = (await treeSearch({ body: { colors: ['green'], near: { value: 6, children: [] }, mixed: 'x' } })).data;
  const pet: Cat | Dog = needed((await petsDescribe({ body: { pet: { kind: 'cat', lives: 9 } } })).data);
  found.pet = pet;
  const photo: Blob | File = needed((await petsPhoto({ body: { id: 'name' } })).data);
  found.photo = await photo.text();
  found.any = (await petsAny({ body: { value: [1, null] } })).data;
  const dropped = await petsDrop({ body: { id: 1 } });
  found.drop = needed(dropped.response).status;
  // @ts-expect-error A text is not an id.
  const refused = await petsDrop({ body: { id: 'none' } });
  found.error = needed(refused.error).code;
  console.log(JSON.stringify(found));
};

void main();
"""

EXPECTED: dict[str, Any] = {
    "get": {"value": 1, "children": [{"value": 2, "children": []}]},
    "add": {"value": 3, "children": [{"value": 4, "children": []}]},
    "pair": ["a", 1],
    "query": {
        "colors": ["red", "green"],
        "near": {"value": 5, "children": []},
        "matrix": [[1, 2], []],
        "limit": 3,
        "mixed": "5",
    },
    "body": {
        "colors": ["green"],
        "near": {"value": 6, "children": []},
        "matrix": None,
        "limit": 10,
        "mixed": "'x'",
    },
    "pet": {"kind": "cat", "lives": 9},
    "photo": "name",
    "any": [1, None],
    "drop": 200,
    "error": "VALIDATION_ERROR",
}


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("exported") / "openapi.json"
    path.write_text(json.dumps(to_openapi(build(), title="Trees and pets")))
    return path


@pytest.fixture(scope="module")
def node_programs() -> None:
    install_node_packages(HERE, ".bin/openapi-ts")


@pytest.fixture(scope="module")
def python_generator() -> list[str]:
    """The command of the generator, in an environment of its own."""
    with (HERE / ".install.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (PYTHON.parent / "openapi-python-client").exists():
            shutil.rmtree(HERE / ".venv", ignore_errors=True)
            venv.create(HERE / ".venv", with_pip=True)
            pip = [str(PYTHON), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            done = subprocess.run(
                [*pip, *PACKAGES],
                env=installer_environment(),
                capture_output=True,
                text=True,
                timeout=scaled(200),
                check=False,
            )
            if done.returncode != 0:
                shutil.rmtree(HERE / ".venv")
                pytest.skip(f"pip cannot install the generator: {done.stderr[-300:]}")
    return [str(PYTHON), "-m", "openapi_python_client"]


def run(command: Sequence[str], folder: Path) -> str:
    """Run a program, which must succeed; return its output."""
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "REDOCLY_TELEMETRY": "off", "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=scaled(120),
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


async def call(command: Sequence[str], folder: Path) -> Any:
    """Serve the API, run a client that receives its address, and return the client's JSON output."""
    async with running(create_app(build())) as url:
        return json.loads(await asyncio.to_thread(run, [*command, url], folder))


@pytest.mark.usefixtures("node_programs")
def test_spectral_finds_no_error(document: Path) -> None:
    rules = document.parent / "spectral.yaml"
    rules.write_text('extends: ["spectral:oas"]\n')
    command = [str(PROGRAMS / "spectral"), "lint", str(document), "-r", str(rules), "-f", "json"]
    found = json.loads(run([*command, "--quiet"], document.parent))

    # The document describes an API whose owner gives no address and no description.
    assert {each["code"] for each in found} <= {"info-contact", "info-description"}


@pytest.mark.usefixtures("node_programs")
def test_redocly_finds_no_error(document: Path) -> None:
    command = [str(PROGRAMS / "redocly"), "lint", str(document), "--format", "json"]
    found = json.loads(run(command, document.parent))

    assert found["totals"]["errors"] == 0
    assert {each["ruleId"] for each in found["problems"]} <= {"info-license", "tag-description"}


async def test_a_client_of_openapi_python_client_has_types_and_works(
    document: Path, python_generator: list[str], tmp_path: Path
) -> None:
    told = ["generate", "--path", str(document), "--output-path", "client", "--meta", "none"]
    output = run([*python_generator, *told], tmp_path)
    script = tmp_path / "calls.py"
    script.write_text(CALLS_IN_PYTHON)
    checker = [sys.executable, "-m", "mypy", "--strict", "--config-file", os.devnull]
    run([*checker, "--python-executable", str(PYTHON), "calls.py", "client"], tmp_path)

    # It formats its output with a program that is not installed, and warns of nothing else.
    assert "WARNING" not in output
    assert await call([str(PYTHON), str(script)], tmp_path) == EXPECTED


@pytest.mark.usefixtures("node_programs")
async def test_a_client_of_hey_api_has_types_and_works(document: Path, tmp_path: Path) -> None:
    generator = str(PROGRAMS / "openapi-ts")
    run([generator, "-i", str(document), "-o", "client", "-c", "@hey-api/client-fetch"], tmp_path)
    (tmp_path / "calls.ts").write_text(CALLS_IN_TYPESCRIPT)
    compiler = [str(PROGRAMS / "tsc"), "--strict", "--outDir", "out", "--target", "es2022"]
    library = ["--lib", "es2022,dom,dom.iterable", "--typeRoots", str(HERE / "node_modules/@types")]
    kind = ["--module", "commonjs", "--moduleResolution", "node10", "--types", "node"]
    run([*compiler, *library, *kind, "calls.ts"], tmp_path)

    assert await call(["node", "out/calls.js"], tmp_path) == EXPECTED
