"""What a server said of its tools the first time, so that a change does not go unnoticed.

Rule: a definition is what a person or a model decided by: name, title, description, schemas, annotations; and what an
      export of ours says beyond them, which decides what is sent twice.
"""

from hashlib import sha256
from typing import Any

from operations._json import canonical
from operations.mcp.config import PinPolicy
from operations.mcp.exported import META_KEY
from operations.types import JSONObject

_DEFINING = ("name", "title", "description", "inputSchema", "outputSchema", "annotations")


def digest(tool: JSONObject, target: str) -> str:
    """SHA-256 over the definition of `tool` and where it lives, in any order of keys."""
    definition = {key: tool[key] for key in _DEFINING if key in tool}
    meta: Any = tool.get("_meta")
    if isinstance(meta, dict) and META_KEY in meta:
        definition[META_KEY] = meta[META_KEY]
    return sha256(canonical([target, definition])).hexdigest()


class Pins:
    """Accepted digests by tool, and those that wait for somebody to accept them."""

    def __init__(self, policy: PinPolicy, accepted: dict[str, str]) -> None:
        self._policy = policy
        self.accepted = accepted
        self.waiting: dict[str, str] = {}

    def judge(self, name: str, found: str) -> bool:
        """Take note of a definition; whether it is another one than was accepted."""
        known = self.accepted.setdefault(name, found)
        changed = known != found and self._policy != "off"
        if not changed:
            self.waiting.pop(name, None)
        elif self._policy == "strict":
            self.waiting[name] = found
        else:
            self.accepted[name] = found
        return changed

    def accept(self, name: str) -> None:
        """Let the new definition of a tool count from now on.

        Raises:
            KeyError: If none waits.
        """
        self.accepted[name] = self.waiting.pop(name)
