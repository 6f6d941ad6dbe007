"""Hatchling calls this for the description of a release: the README without pictures, which only the repository has."""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

_PICTURE = re.compile(r"^!\[[^\]]*\]\(docs/[^)]*\)\n\n?", re.MULTILINE)


class PackageReadme(MetadataHookInterface):
    """Sets the description of the package."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add the description to the metadata."""
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": _PICTURE.sub("", text)}
