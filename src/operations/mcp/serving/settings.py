"""How a registry is served over MCP."""

from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field
from typing import Any, TypeAlias, get_args

from starlette.requests import Request

from operations._names import Disclosure, NameStyle
from operations._text import enforce_lists, suggestion
from operations.access import Identity
from operations.front.limits import Limits

Identify: TypeAlias = Callable[[Request], Identity | Awaitable[Identity | None] | None]
"""Who sends a request; None for nobody in particular. An exception refuses the request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MCPServerSettings:
    """What `to_mcp` was asked for.

    Raises:
        ValueError: If a number is not positive.
    """

    name: str = "operations"
    version: str = ""
    title: str | None = None

    instructions: str | None = None
    """What a model should know before it uses the server."""

    names: NameStyle = "portable"
    """The names of tools and prompts: `math__add`, which every model accepts, or `dotted`, the ids."""

    disclosure: Disclosure = "auto"
    """List all operations as tools, the four gateway tools, or whichever fits (`auto`)."""

    max_tools: int = 100
    """With `auto`: the most tools that are listed; a caller who may call more gets the gateway."""

    max_tokens: int = 50_000
    """With `auto`: about the most tokens a listing may have, at four bytes each."""

    page_size: int = 250
    """Items in one page of a listing."""

    schema_budget: int = 16 * 1024
    """Bytes of JSON for the shared definitions in one schema of a listing; what is farther away becomes `{}`."""

    timeout: float = 30
    """Seconds a call may take."""

    max_items: int = 1_000
    """Items of a subscription in the final list; with them the call ends."""

    max_items_bytes: int = 1024 * 1024
    """Bytes of JSON in that list."""

    identity: Identity | None = None
    """Who asks where there is no HTTP request to tell: on stdio and in memory."""

    identify: Identify | None = None
    """Who sends an HTTP request."""

    expose_errors: bool = False
    """Show the text of unexpected errors to callers."""

    limits: Limits = field(default_factory=Limits)
    """On sizes, times and rates. An application of `create_app` around the server uses its own instead."""

    scopes_supported: Collection[str] = ()
    """Publicly known scopes: a tool that requires only these is denied, any other looks as if it did not exist."""

    def __post_init__(self) -> None:
        choices: tuple[tuple[str, Any], ...] = (("names", NameStyle), ("disclosure", Disclosure))
        for name, choice in choices:
            known, value = get_args(choice), getattr(self, name)
            if value not in known:
                hint = suggestion(str(value), known)
                raise ValueError(f"{name} must be {' or '.join(known)}, not {value!r}.{hint}")
        enforce_lists(scopes_supported=self.scopes_supported)
        numbers = (
            "max_tools", "max_tokens", "page_size", "schema_budget", "timeout", "max_items", "max_items_bytes",
        )  # fmt: skip
        for name in numbers:
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} is a positive number, not {getattr(self, name)!r}")
