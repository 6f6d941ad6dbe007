"""Pages of the documentation site that are no files of docs/: MkDocs calls this while it builds.

    index.md             README.md, with its links as seen from docs/
    changelog.md         CHANGELOG.md
    reference/*.md       every public module, from its docstrings
    screenshots.md       what tests/console left in build/screenshots, if it ran
"""

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

PROJECT = Path(__file__).resolve().parent.parent
SCREENSHOTS = PROJECT / "build" / "screenshots"

REFERENCE: dict[str, tuple[str, ...]] = {
    "operations": ("operations",),
    "operations.openapi": ("operations.openapi",),
    "operations.mcp": ("operations.mcp",),
    "operations.calls": ("operations.calls", "operations.calls.hub"),
    "operations.pubsub": (
        "operations.pubsub",
        "operations.pubsub.memory",
        "operations.pubsub.redis",
        "operations.pubsub.nats",
        "operations.pubsub.websocket",
    ),
    "operations.server": (
        "operations.server",
        "operations.server.running",
        "operations.server.tokens",
        "operations.server.console",
    ),
    "operations.telemetry": (
        "operations.telemetry.access_log",
        "operations.telemetry.audit",
        "operations.telemetry.metrics",
        "operations.telemetry.otel",
    ),
}
"""Pages of the reference, and the modules on them."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Complete the navigation: every decision, and pages of docs/ that mkdocs.yml does not name."""
    sections = {title: pages for entry in config.nav or [] for title, pages in entry.items()}
    named = str(config.nav)
    docs = PROJECT / "docs"
    sections["How-tos"] += [page.name for page in sorted(docs.glob("*.md")) if page.name not in named]
    decisions = [f"decisions/{page.name}" for page in sorted((docs / "decisions").glob("0*.md"))]
    sections["Why"].append({"Decisions": ["decisions/README.md", *decisions]})
    return config


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add the pages that are made here."""
    pages = {
        "index.md": _seen_from_docs("README.md"),
        "changelog.md": _seen_from_docs("CHANGELOG.md"),
        "screenshots.md": _screenshots(),
        **{f"reference/{name}.md": _reference(name) for name in REFERENCE},
    }
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    for picture in _pictures():
        files.append(
            File.generated(config, f"screenshots/{picture.name}", abs_src_path=str(picture))
        )
    return files


def _seen_from_docs(name: str) -> str:
    return (PROJECT / name).read_text(encoding="utf-8").replace("](docs/", "](")


def _reference(page: str) -> str:
    parts = [f"# `{page}`\n"]
    for module in REFERENCE[page]:
        if module != page:
            parts.append(f"## `{module}`\n")
        parts.append(f"::: {module}\n    options:\n      heading_level: {2 if module == page else 3}\n")
    return "\n".join(parts)


def _pictures() -> list[Path]:
    return sorted(SCREENSHOTS.glob("*.png"))


def _screenshots() -> str:
    parts = [
        "# What the console looks like\n",
        "The [console](console.md)'s tests use it in a real browser and keep what they saw: `scripts/test tests/console`.\n",
    ]
    for picture in _pictures():
        title = picture.stem.replace("-", " ").replace("_", " ").capitalize()
        parts.append(f"## {title}\n\n![{title}](screenshots/{picture.name})\n")
    if len(parts) == 2:
        parts.append("They have not run where this site was built, so there is nothing to see here.\n")
    return "\n".join(parts)
