"""Fixtures of all test folders."""

import asyncio
import gc
import inspect
import logging
import os
import subprocess
from collections.abc import Generator, Iterator
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from tests.leftovers import Leftovers, counted_at_closing
from tests.limits import scaled
from tests.load import REPEATED, REPEATS

from operations import OperationRegistry

PROJECT = Path(__file__).resolve().parent.parent

# The duration of an example depends more on the machine than on the code.
settings.register_profile(
    "default", deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("default")


def pytest_configure() -> None:
    """Trust one certificate authority, whose key does not exist any more: the tests connect to this machine only.

    Every HTTP client, and every process that imports one, would read all authorities of the system, which takes longer
    than many tests. Installers need the real authorities: `servers.installer_environment`.
    """
    os.environ.setdefault("REAL_SSL_CERT_FILE", os.environ.get("SSL_CERT_FILE", ""))
    os.environ["SSL_CERT_FILE"] = str(PROJECT / "tests" / "no_authority.crt")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        name = item.nodeid.partition("[")[0].removeprefix("tests/")
        if name in REPEATED:
            item.add_marker(pytest.mark.flaky(reruns=REPEATS))
    # Otherwise one process would still install a program of a slow test when all others have ended.
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Scale the limit of the whole test, before the plugin that enforces it reads it."""
    mark = item.get_closest_marker("timeout")
    if limit := mark.args[0] if mark else item.config.getini("timeout"):
        item.add_marker(pytest.mark.timeout(scaled(float(limit))), append=False)
    return (yield)


def pytest_collection_finish() -> None:
    freeze("")


@pytest.hookimpl(trylast=True)
def pytest_runtest_logfinish(nodeid: str) -> None:
    freeze(nodeid.partition("::")[0])


@cache
def freeze(_file: str) -> None:
    """Exclude all objects from garbage collection, once per file of tests: modules, collected tests, cached documents.

    Many tests collect garbage, and each collection would take up to a third of a second.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def registry() -> OperationRegistry:
    return OperationRegistry()


@pytest.fixture(autouse=True)
def log_level() -> Iterator[None]:
    """Restore the log level that a command of the test set."""
    logger = logging.getLogger("operations")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture(autouse=True)
def nothing_left_of_faults(request: pytest.FixtureRequest) -> None:
    """Check that a test of the fault matrix leaves nothing behind."""
    marks = request.node.iter_markers("requirement")
    if any(row.startswith("F") for mark in marks for row in mark.args):
        request.getfixturevalue("nothing_left")
        request.getfixturevalue("nobody_waiting")


@pytest.fixture
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Check that the test leaves no task, no unretrieved exception and no memory behind."""
    is_async = inspect.iscoroutinefunction(getattr(request, "function", None))
    leftovers = Leftovers(request.getfixturevalue("loop_of_the_test") if is_async else None)
    failed = request.session.testsfailed
    yield
    found = leftovers.collect()
    # The leftovers of a failed test are kept for its report.
    assert not found or request.session.testsfailed > failed, found


@pytest.fixture
def nobody_waiting(request: pytest.FixtureRequest) -> Iterator[None]:
    """The test closes no map in which a call still waits."""
    failed = request.session.testsfailed
    with counted_at_closing() as waiting:
        yield
    assert not waiting or request.session.testsfailed > failed, waiting


@pytest.fixture
async def loop_of_the_test(anyio_backend: str) -> asyncio.AbstractEventLoop:
    return asyncio.get_running_loop()


def _openssl(folder: Path, arguments: str) -> None:
    subprocess.run(["openssl", *arguments.split()], cwd=folder, check=True, capture_output=True)


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a certificate authority, and a server and a client that it signed."""
    folder = tmp_path_factory.mktemp("certificates")
    curve = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"
    # Python 3.13 and later require the key usage and the key identifier.
    issuer = "-subj /CN=ca -days 2 -addext keyUsage=critical,keyCertSign"
    _openssl(folder, f"req -x509 {curve} -keyout ca.key -out ca.pem {issuer}")
    extensions = "subjectAltName=IP:127.0.0.1,DNS:api.example.com\nauthorityKeyIdentifier=keyid\n"
    (folder / "extensions").write_text(extensions)
    for name in ("server", "client"):
        _openssl(folder, f"req {curve} -keyout {name}.key -out {name}.csr -subj /CN={name}")
        signer = "-CA ca.pem -CAkey ca.key -CAcreateserial -days 2 -extfile extensions"
        _openssl(folder, f"x509 -req -in {name}.csr -out {name}.pem {signer}")
    both = (folder / "client.pem").read_text() + (folder / "client.key").read_text()
    (folder / "both.pem").write_text(both)
    return folder
