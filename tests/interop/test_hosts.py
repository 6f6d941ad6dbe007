"""Programs with loops and threads of their own: a Jupyter kernel and Django. `scripts/matrix hosts` installs them."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.limits import scaled

CELLS = [
    "from operations import OperationRegistry\nimport operations\nregistry = OperationRegistry()",
    '@registry.operation("math.double", type="query")\nasync def double(number: int) -> int:\n    return 2 * number',
    "import asyncio\nassert asyncio.get_running_loop().is_running()\nregistry.sync.math.double(number=21)",
    '[each.data for each in registry.sync.subscribe("math.count")]',
]


def test_a_notebook_calls_without_await() -> None:
    nbformat: Any = pytest.importorskip("nbformat")
    nbclient: Any = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    count = (
        "from collections.abc import AsyncIterator\n"
        '@registry.operation("math.count")\n'
        "async def count() -> AsyncIterator[int]:\n"
        "    for number in range(3):\n"
        "        yield number"
    )
    cells = [*CELLS[:3], count, CELLS[3]]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(each) for each in cells])

    nbclient.NotebookClient(notebook, timeout=int(scaled(120)), kernel_name="python3").execute()

    results = [cell.outputs[0].data["text/plain"] for cell in notebook.cells if cell.outputs]
    assert results == ["42", "[0, 1, 2]"]


DJANGO = """
import asyncio, sys
import django
from django.conf import settings
from django.core.asgi import get_asgi_application
from django.core.wsgi import get_wsgi_application
from django.http import JsonResponse
from django.test import AsyncClient, Client
from django.urls import path
from operations import CallError, OperationRegistry

settings.configure(ROOT_URLCONF=__name__, SECRET_KEY="x", ALLOWED_HOSTS=["*"])
django.setup()
registry = OperationRegistry()


@registry.operation("math.double", type="query")
async def double(number: int) -> int:
    await asyncio.sleep(0)
    return 2 * number


def view(request, number):
    try:
        return JsonResponse({"found": registry.sync.math.double(number=number)})
    except CallError as error:
        return JsonResponse(error.to_wire(), status=400)


async def async_view(request, number):
    envelope = await registry.execute("math.double", {"number": number})
    return JsonResponse({"found": envelope.data})


urlpatterns = [path("sync/<int:number>", view), path("async/<int:number>", async_view)]
print(Client().get("/sync/4").json(), Client().get("/async/4").json())


async def main():
    # Django runs a plain view of an ASGI application in a thread.
    found = await asyncio.gather(*(AsyncClient().get(f"/{kind}/{n}") for n in range(20) for kind in ("sync", "async")))
    print(sorted({each.json()["found"] for each in found}) == [2 * n for n in range(20)])


asyncio.run(main())
"""


def test_django_calls_from_plain_views_under_wsgi_and_asgi(tmp_path: Path) -> None:
    pytest.importorskip("django")
    (tmp_path / "site_of_django.py").write_text(DJANGO)
    ran = subprocess.run(
        [sys.executable, "site_of_django.py"], cwd=tmp_path, env=os.environ,
        capture_output=True, text=True, timeout=scaled(120), check=False,
    )  # fmt: skip
    assert ran.stdout.split("\n")[:2] == ["{'found': 8} {'found': 8}", "True"], ran.stderr
