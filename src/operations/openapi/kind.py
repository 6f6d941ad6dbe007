"""HTTP APIs as a kind of source: the table `[openapi.NAME]`, its checks, and how it is opened."""

import asyncio
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

from operations.base.errors import OperationsError
from operations.base.json.values import object_of
from operations.base.text import counted
from operations.base.types import Names
from operations.contract.access import AccessControl
from operations.contract.options import Derived, KeyPath
from operations.contract.specs import OperationSpec
from operations.sources import checks
from operations.sources.contract import Guess, Opened, Place, Skipped, SourceEntry


def _http_service() -> tuple[type, ...]:
    from operations.openapi.source.config import HTTPServiceConfig  # noqa: PLC0415 - takes long to import

    return (HTTPServiceConfig,)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAPIEntry(SourceEntry):
    """An HTTP API. The name of its table is the namespace of its operations.

    Attributes:
        document: The OpenAPI or Swagger document: a path relative to this file, or an address.
        scopes: Scopes that a caller needs for every operation of this source; short for `access`.
        pages: Add a subscription that reads all pages of an operation if the document declares paging; short for
            `pagination`.
        enabled: Set to false to skip this source.
    """

    advanced: ClassVar = frozenset(
        [
            "proxy",
            "trust_env",
            "ca_file",
            "client_certificate",
            "client_key",
            "call_headers",
            "input",
            "exact_schemas",
            "flatten_body",
            "follow_redirects",
            "retry_refused",
            "restore",
            "max_response_bytes",
            "max_response_values",
            "max_response_depth",
            "max_request_bytes",
            "max_event_bytes",
            "max_error_bytes",
            "max_document_bytes",
            "max_document_files",
            "document_root",
            "sign_documents",
            "connections",
            "max_file_bytes",
            "pagination",
            "access",
        ]
    )
    derived: ClassVar = Derived(
        _http_service, {"namespace": "the name of the table"}, named="namespace"
    )
    short: ClassVar = {"scopes": "access", "pages": "pagination"}

    document: str
    scopes: Names = ()
    pages: bool = False

    @property
    def files(self) -> Iterable[str]:
        """The document, unless it is at an address."""
        return () if "://" in self.document else (self.document,)


_ADDRESS = re.compile(r"[\w.-]+:\d+(/.*)?")
"""An address without its scheme."""


class OpenAPIKind:
    """APIs with an OpenAPI document."""

    name = table = "openapi"
    about = "HTTP APIs, by namespace."
    entry = OpenAPIEntry
    owns_namespace = True
    is_late = False

    def check(
        self, entry: OpenAPIEntry, path: KeyPath, folder: Path
    ) -> Iterator[tuple[KeyPath, str]]:
        """Check addresses and headers."""
        document, options = entry.document, entry.options
        if "://" in document:
            yield from checks.web_address(document, (*path, "document"))
        elif not document:
            yield (*path, "document"), "is empty. Name a file or an address."
        for key in ("base_url", "proxy"):
            if isinstance(options.get(key), str):
                yield from checks.web_address(options[key], (*path, key))
        yield from checks.headers(object_of(options.get("headers")), (*path, "headers"))

    def guess(self, words: Sequence[str], *, is_certain: bool) -> Guess | None:
        """Take a file, or an address over HTTP, as a document."""
        first, *others = words
        path, is_address = Path(first), urlsplit(first).scheme in {"http", "https"}
        if others and not is_certain:
            return None
        if _ADDRESS.fullmatch(first):
            raise OperationsError(f"{first} needs a scheme: http://{first} or https://{first}")
        is_document = path.is_file() and path.suffix != ".py"
        if not is_address and not is_document and path.suffix in {".json", ".yaml", ".yml"}:
            remedy = ": download the document, and name the file" if "://" in first else ""
            raise OperationsError(f"there is no file {first}{remedy}")
        if not (is_certain or is_address or is_document):
            return None
        return Guess(name=checks.name_of(first), keys={"document": first})

    async def open(self, name: str, entry: OpenAPIEntry, place: Place) -> Opened:
        """Read the document of an API and create its operations.

        Raises:
            ValueError: If the document or a secret cannot be read.
            DocumentError: If the document cannot be used.
        """
        from operations.openapi import from_openapi_file, from_openapi_url  # noqa: PLC0415 - takes long to import

        config = service_config(name, entry, place)
        place.load_functions([getattr(config.auth, "token", None), *config.credentials.values()])
        if "://" in entry.document:
            service = await from_openapi_url(entry.document, config)
        else:
            path = place.existing(entry.document, f"openapi.{name}.document")
            service = await from_openapi_file(path, config)
        # In a thread, because both read the whole document.
        problems, unaddressed = await asyncio.to_thread(
            lambda: (service.problems, service.unaddressed)
        )
        return Opened(
            operations=service,
            close=service.aclose,
            calls=lambda: service.calls,
            limit_calls=None if "concurrency" in entry.options else service.limit_calls,
            origin=entry.document,
            skipped=[Skipped(problem.where, problem.reason) for problem in problems],
            warnings=_unaddressed(name, len(unaddressed), len(service)),
            title=service.title or "",
            advice=advice,
        )


def advice(specs: Sequence[OperationSpec]) -> Iterator[str]:
    """Yield what would make the operations of a document better to use."""
    from operations.openapi.source.diagnosis import shortened  # noqa: PLC0415 - takes long to import

    if found := shortened(specs):
        name, short = next(iter(found.items()))
        words = f"{counted(len(found), 'operation id')} with path and method"
        yield f'{words}: operation_ids = "short" makes {name} {short}'


def service_config(name: str, entry: OpenAPIEntry, place: Place) -> Any:
    """Return the `HTTPServiceConfig` of the importer, with its secrets.

    Raises:
        ValueError: If a secret cannot be read.
    """
    from operations.openapi import HTTPServiceConfig  # noqa: PLC0415 - takes long to import

    short: dict[str, Any] = {"namespace": name}
    if entry.scopes:
        short["access"] = AccessControl(entry.scopes)
    if "concurrency" not in entry.options:
        short["concurrency"] = place.calls
    if entry.pages:
        short["pagination"] = "document"
    return HTTPServiceConfig(**place.options(HTTPServiceConfig, entry), **short)


def _unaddressed(name: str, count: int, total: int) -> list[Skipped]:
    """Return the warning about operations that cannot be called because the document names no server."""
    if not count:
        return []
    which = "its" if count == total else f"{count} of its {total}"
    reason = (
        f"is missing: the document names no server, and {which} operations cannot be called"
        f" without it. Set it in [openapi.{name}]"
    )
    return [Skipped("base_url", reason)]


KIND = OpenAPIKind()
