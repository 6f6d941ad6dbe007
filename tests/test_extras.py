"""Each extra installs the packages that its modules import, and modules name their extra if it is missing."""

import json
import re
import subprocess
import sys
from collections import defaultdict
from functools import cache
from importlib.metadata import distributions
from pkgutil import walk_packages
from typing import Any

from packaging.utils import canonicalize_name
from tests.support import installed_by

import operations

MODULES = {
    "": ["calls", "pubsub.memory", "agents", "authority", "config", "openapi", "testing"],
    "code": ["code.service"],
    "cli": ["__main__", *(f"cli.{name}" for name in ("call", "doctor", "export", "setup", "work"))],
    "jwt,server": ["server.signin.tokens"],
    "mcp": ["mcp.source.client", "mcp.source.oauth", "mcp.serving.app"],
    "nats": ["pubsub.nats"],
    "openapi": ["io.http.aiohttp", "openapi.reading.yaml"],
    "otel": ["telemetry.otel"],
    "otlp": ["telemetry.otlp"],
    "redis": ["pubsub.redis"],
    "postgres": ["postgres"],
    "server": ["server", "server.http11.running", "server.console", "hub.app"],
    "websocket": ["pubsub.websocket", "calls.socket"],
}
"""The modules that must be importable with nothing but these extras."""

EXEMPT = ("operations.cli", "operations.testing.plugin")
"""Modules of the command, which names its extra when it starts, and of pytest, which loads them itself."""

PLACE = re.compile(r"^(\w+)(?:/(\w+))?", re.MULTILINE)
"""The first two names of the path of an installed file."""

PROBE = """
import importlib, json, os, sys
from importlib.machinery import PathFinder

class Finder(PathFinder):
    hidden = frozenset()

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name in cls.hidden else super().find_spec(name, path, target)

sys.meta_path = [Finder if each is PathFinder else each for each in sys.meta_path]
for hidden, modules in json.load(sys.stdin):
    Finder.hidden = frozenset(hidden)
    import operations
    if (child := os.fork()):
        os.waitpid(child, 0)
        continue
    outcomes = {}
    for module in modules:
        try:
            importlib.import_module(module)
        except BaseException as error:
            outcomes[module] = [type(error).__name__, str(error)]
    print(json.dumps(outcomes), flush=True)
    os._exit(0)
"""
"""Imports modules while some packages cannot be found, each time in a process of its own."""


@cache
def _providers() -> dict[str, set[str]]:
    """Return the distributions that contain each package, and each package or module directly inside it."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for each in distributions():
        distribution = canonicalize_name(each.name)
        for first, second in set(PLACE.findall(each.read_text("RECORD") or "")):
            for name in (first, f"{first}.{second}"):
                found[name].add(distribution)
    return found


def _hidden(extras: str) -> list[str]:
    """Return the names that cannot be imported if only these extras are installed."""
    present = installed_by(f"alkdev-operations[{extras}]" if extras else "alkdev-operations")
    return [name for name, providers in _providers().items() if not providers & present]


def _imported(*cases: tuple[str, list[str]]) -> list[dict[str, Any]]:
    """Import modules with some extras only; return the errors of each case."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE], input=json.dumps([(_hidden(e), m) for e, m in cases]),
        capture_output=True, text=True, timeout=200, check=True,
    )  # fmt: skip
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_each_extra_brings_what_its_modules_import() -> None:
    cases = [(e, [f"operations.{name}" for name in names]) for e, names in MODULES.items()]

    errors = dict(zip(MODULES, _imported(*cases), strict=True))

    assert not {extras: failed for extras, failed in errors.items() if failed}


def test_a_module_whose_extra_is_missing_names_it() -> None:
    walked = walk_packages(operations.__path__, "operations.")
    names = [each.name for each in walked if not each.name.startswith(EXEMPT)]

    errors, with_mcp, with_cli = _imported(
        ("", names),
        ("mcp", ["operations.server.http11.running"]),
        ("cli", ["operations.cli.serve", "operations.cli.demo"]),
    )

    assert errors.pop("operations.__main__")[0] == "SystemExit"
    for extra, module in {"mcp": "mcp", "redis": "pubsub.redis", "server": "server"}.items():
        kind, message = errors[
            "operations.mcp.source" if module == "mcp" else f"operations.{module}"
        ]
        assert kind == "MissingExtraError"
        assert message.endswith(
            f"{module} needs the '{extra}' extra: pip install 'alkdev-operations[{extra}]'"
        )
    assert set(with_mcp) | set(with_cli) == {
        "operations.server.http11.running",
        "operations.cli.serve",
        "operations.cli.demo",
    }
    errors |= with_mcp | with_cli
    assert not {name: error for name, error in errors.items() if error[0] != "MissingExtraError"}
