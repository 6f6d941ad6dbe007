"""Generate the pages of the documentation site that are not files of docs/. MkDocs calls this module while it builds.

index.md             README.md, with its links as seen from docs/
changelog.md         CHANGELOG.md
reference/*.md       every public module, from its docstrings
reference/file.md    every key of operations.toml, from the config classes
screenshots.md       the pictures that tests/console saved in build/screenshots, if any
"""

import ast
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

from operations.config.model import config_schema

PROJECT = Path(__file__).resolve().parent.parent
SCREENSHOTS = PROJECT / "build" / "screenshots"

CORE = {
    "Registry": "OperationRegistry operation run connect scan_operations ScanResult subscribe Subscription Remote",
    "Specs": (
        "Operation OperationSpec OperationType OperationHandler SubscriptionHandler ErrorDefinition OutputPolicy"
        " InputPolicy"
    ),
    "Calls": (
        "OperationContext OperationEnv build_env CallerChannel Call Middleware Next StreamMiddleware NextStream "
        "Observer CallEvent"
    ),
    "Access": "AccessControl Identity check_access enforce_access",
    "Envelopes": (
        "ResponseEnvelope ResponseMeta Change LocalResponseMeta HTTPResponseMeta MCPResponseMeta local_envelope"
        " http_envelope mcp_envelope is_response_envelope unwrap ResponseSource RESPONSE_SOURCES MCPContentBlock"
        " TextContent ImageContent AudioContent ResourceContent ResourceLink MCPResourceContent MCPAnnotations"
    ),
    "Schemas": (
        "Schema from_schema schema_for collect_errors validate_or_raise format_value_errors assert_is_schema"
        " ValidationIssue CastResult"
    ),
    "Errors": (
        "CallError ErrorCode map_error OperationsError MissingExtraError RegistrationError SchemaError TransportError"
    ),
    "On the wire": (
        "RESPONSE_ENVELOPE_SCHEMA RESPONSE_META_SCHEMA OPERATION_SPEC_SCHEMA CALL_EVENT_SCHEMAS"
    ),
}
"""The names of `operations`, by topic."""

MODULES = {
    "operations.openapi": {"operations.openapi": ""},
    "operations.mcp": {"operations.mcp": ""},
    "operations.calls": {"operations.calls": "", "operations.calls.socket": "WebSocketHub"},
    "operations.pubsub": {
        "operations.pubsub": "",
        "operations.pubsub.memory": "MemoryTarget",
        "operations.pubsub.redis": "",
        "operations.pubsub.nats": "",
        "operations.pubsub.websocket": (
            "WebSocketTarget AcceptedTarget Socket connect_websocket serve_websocket accept_websocket"
        ),
    },
    "operations.server": {
        "operations.server": "",
        "operations.server.http11.running": "running build_server InsecureBindError",
        "operations.server.signin.tokens": "JWTs",
    },
    "operations.hub": {"operations.hub": ""},
    "operations.agents": {"operations.agents": ""},
    "operations.runs": {"operations.runs": ""},
    "operations.store": {"operations.store": ""},
    "operations.postgres": {"operations.postgres": ""},
    "operations.code": {"operations.code": ""},
    "operations.tools": {"operations.tools": "ToolConfig ToolSettings configure_tools"},
    "operations.sources": {
        "operations.sources": "",
    },
    "operations.sources.credentials": {
        "operations.sources.credentials": "CallerToken TokenExchange hold_token"
    },
    "operations.testing": {
        "operations.testing": "",
        "operations.testing.plugin": "under_test",
    },
    "operations.telemetry": {
        "operations.telemetry": "Audit AuditConfig AuditFile AuditRecord CallMetrics LogConfig TelemetryConfig "
        "logging_to_stderr",
        "operations.telemetry.otel": "instrument Spans",
        "operations.telemetry.otlp": "exporting",
    },
}
"""The other pages of the reference: their modules, and the names of those that export none."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Complete the navigation: every decision, and pages of docs/ that mkdocs.yml does not name."""
    sections = {title: pages for entry in config.nav or [] for title, pages in entry.items()}
    named = str(config.nav)
    docs = PROJECT / "docs"
    sections["How-to guides"] += [
        page.name for page in sorted(docs.glob("*.md")) if f"'{page.name}'" not in named
    ]
    decisions = [f"decisions/{page.name}" for page in sorted((docs / "decisions").glob("0*.md"))]
    sections["Explanation"].append({"Decisions": ["decisions/README.md", *decisions]})
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages that are made here."""
    pictures = sorted(SCREENSHOTS.glob("*.png"))
    pages = {
        "index.md": _seen_from_docs("README.md"),
        "changelog.md": _seen_from_docs("CHANGELOG.md"),
        "screenshots.md": _screenshots(pictures),
        "reference/operations.md": _core(),
        "reference/file.md": _config_reference(),
        **{f"reference/{page}.md": _reference(page, modules) for page, modules in MODULES.items()},
    }
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    for picture in pictures:
        files.append(
            File.generated(config, f"screenshots/{picture.name}", abs_src_path=str(picture))
        )
    return files


def _config_reference() -> str:
    schema: Any = config_schema().document
    lines = [
        "# `operations.toml`: every key\n",
        "Generated from the config classes of the package. [Configuration](../config.md) explains the tables.\n",
        *_table((), schema, schema["$defs"]),
    ]
    return "\n".join(lines)


def _table(path: tuple[str, ...], schema: Any, known: Any) -> Iterator[str]:
    """Yield the section of one table of the file, and those of the tables in it."""
    if path:
        yield f"## `[{'.'.join(path)}]`\n"
        yield f"{schema.get('description', '')}\n"
    yield "| key | type | default | meaning |\n|---|---|---|---|"
    below: list[tuple[tuple[str, ...], Any]] = []
    for key, value in schema["properties"].items():
        what = value.get("description", "")
        default = f"`{json.dumps(value['default'])}`" if "default" in value else ""
        if value.get("default") in ({}, []):
            default = ""
        yield f"| `{key}` | {_type(value, known)} | {default} | {what} |".replace("\n", " ")
        below += [((*path, *names), inner) for names, inner in _inner((key,), value, known)]
    yield ""
    for names, inner in below:
        yield from _table(names, inner, known)


def _inner(
    names: tuple[str, ...], schema: Any, known: Any
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the tables that a key may hold, each with its name in the file."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        if name != "Secret":
            yield names, {**known[name], "description": known[name].get("description", "")}
    elif "properties" in schema:
        yield names, schema
    elif isinstance(schema.get("additionalProperties"), dict):
        yield from _inner((*names, "NAME"), schema["additionalProperties"], known)
    for option in schema.get("anyOf", ()):
        yield from _inner(names, option, known)


def _type(schema: Any, known: Any) -> str:
    """Return the allowed values of a key as text."""
    if "enum" in schema or "const" in schema:
        return ", ".join(
            f"`{json.dumps(each)}`" for each in schema.get("enum", [schema.get("const")])
        )
    if "$ref" in schema:
        return "secret" if schema["$ref"].endswith("/Secret") else "table"
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_type(each, known) for each in schema["anyOf"]))
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {}), known)}"
    kinds = schema.get("type", "any")
    kinds = [kinds] if isinstance(kinds, str) else kinds
    return " or ".join({"object": "table", "null": "nothing"}.get(each, each) for each in kinds)


def _seen_from_docs(name: str) -> str:
    return (PROJECT / name).read_text(encoding="utf-8").replace("](docs/", "](")


def _core() -> str:
    parts = ["# `operations`\n"]
    for title, names in CORE.items():
        parts.append(f"## {title}\n")
        parts += [
            _directive(f"operations.{name}", values=title != "On the wire")
            for name in names.split()
        ]
    return "\n".join(parts)


def _reference(page: str, modules: dict[str, str]) -> str:
    parts = [f"# `{page}`\n"]
    for module, names in modules.items():
        if module != page:
            parts.append(f"## `{module}`\n")
        text = _source(module)
        parts.append(ast.get_docstring(text) or "")
        parts += [_directive(f"{module}.{name}") for name in names.split() or _exported(text)]
    return "\n".join(parts)


def _source(module: str) -> ast.Module:
    path = PROJECT.joinpath("src", *module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8"))


def _exported(module: ast.Module) -> list[str]:
    for node in module.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    return []


def _directive(name: str, *, values: bool = True) -> str:
    shown = "" if values else "    options: { show_attribute_values: false }\n"
    return f"::: {name}\n{shown}"


def _screenshots(pictures: list[Path]) -> str:
    parts = [
        "# What the console looks like\n",
        "The tests of the [console](console.md) use it in a real browser, and keep these pictures.\n",
    ]
    for picture in pictures:
        title = picture.stem.replace("-", " ").capitalize()
        parts.append(f"## {title}\n\n![{title}](screenshots/{picture.name})\n")
    if not pictures:
        parts.append("They had not run where this site was built, so there is nothing to see.\n")
    return "\n".join(parts)
