"""Pages of the documentation site that are no files of docs/: MkDocs calls this while it builds.

index.md             README.md, with its links as seen from docs/
changelog.md         CHANGELOG.md
reference/*.md       every public module, from its docstrings
screenshots.md       what tests/console left in build/screenshots, if it ran
"""

import ast
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

PROJECT = Path(__file__).resolve().parent.parent
SCREENSHOTS = PROJECT / "build" / "screenshots"

CORE = {
    "Registry": "OperationRegistry operation scan_operations ScanResult subscribe Subscription Remote",
    "Specs": "Operation OperationSpec OperationType OperationHandler SubscriptionHandler ErrorDefinition OutputPolicy",
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
"""The names of `operations`, by what they are about."""

MODULES = {
    "operations.openapi": {"operations.openapi": ""},
    "operations.mcp": {"operations.mcp": ""},
    "operations.calls": {"operations.calls": "", "operations.calls.hub": "WebSocketHub"},
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
        "operations.server.running": "running build_server InsecureBindError",
        "operations.server.tokens": "JWTs",
        "operations.server.console": "console_app console_routes",
    },
    "operations.hub": {"operations.hub": ""},
    "operations.agents": {"operations.agents": ""},
    "operations.tools": {"operations.tools": "ToolConfig configure_tools"},
    "operations.telemetry": {
        "operations.telemetry.audit": "Audit AuditFile AuditRecord",
        "operations.telemetry.config": "AuditConfig LogConfig TelemetryConfig",
        "operations.telemetry.logs": "AccessLog logging_to_stderr",
        "operations.telemetry.metrics": "CallMetrics",
        "operations.telemetry.otel": "exporting instrument Spans",
    },
}
"""The other pages of the reference: their modules, and the names of those that export none."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Complete the navigation: every decision, and pages of docs/ that mkdocs.yml does not name."""
    sections = {title: pages for entry in config.nav or [] for title, pages in entry.items()}
    named = str(config.nav)
    docs = PROJECT / "docs"
    sections["How-tos"] += [
        page.name for page in sorted(docs.glob("*.md")) if f"'{page.name}'" not in named
    ]
    decisions = [f"decisions/{page.name}" for page in sorted((docs / "decisions").glob("0*.md"))]
    sections["Why"].append({"Decisions": ["decisions/README.md", *decisions]})
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages that are made here."""
    pictures = sorted(SCREENSHOTS.glob("*.png"))
    pages = {
        "index.md": _seen_from_docs("README.md"),
        "changelog.md": _seen_from_docs("CHANGELOG.md"),
        "screenshots.md": _screenshots(pictures),
        "reference/operations.md": _core(),
        **{f"reference/{page}.md": _reference(page, modules) for page, modules in MODULES.items()},
    }
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    for picture in pictures:
        files.append(
            File.generated(config, f"screenshots/{picture.name}", abs_src_path=str(picture))
        )
    return files


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
        "The tests of the [console](console.md) use it in a real browser, and keep what they saw.\n",
    ]
    for picture in pictures:
        title = picture.stem.replace("-", " ").capitalize()
        parts.append(f"## {title}\n\n![{title}](screenshots/{picture.name})\n")
    if not pictures:
        parts.append("They had not run where this site was built, so there is nothing to see.\n")
    return "\n".join(parts)
