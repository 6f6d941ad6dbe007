"""Operations of an HTTP API."""

from typing import Any

from operations.access import AccessControl
from operations.config import ConfigFile
from operations.config.model import OpenAPIEntry
from operations.hub.source import Opened, load_tokens, per_source
from operations.openapi import (
    HTTPServiceConfig,
    OpenAPIService,
    from_openapi_file,
    from_openapi_url,
)
from operations.scanner import Skipped


async def open_service(name: str, entry: OpenAPIEntry, file: ConfigFile) -> Opened:
    """Read an API's document and make its operations.

    Raises:
        ConfigError: If the document or a secret cannot be read.
        DocumentError: If the document cannot be read.
    """
    config = service_config(name, entry, file)
    load_tokens(file, [getattr(config.auth, "token", None), *config.credentials.values()])
    if "://" in entry.document:
        service = await from_openapi_url(entry.document, config)
    else:
        path = file.existing(entry.document, f"openapi.{name}.document")
        service = await from_openapi_file(path, config)
    return Opened(
        operations=service,
        close=service.aclose,
        calls=lambda: service.calls,
        origin=entry.document,
        skipped=[Skipped(problem.where, problem.reason) for problem in service.problems],
        warnings=_warnings(name, service),
        title=service.title or "",
    )


def _warnings(name: str, service: OpenAPIService) -> list[Skipped]:
    count = len(service.unaddressed)
    if not count:
        return []
    which = "its" if count == len(service) else f"{count} of its {len(service)}"
    reason = (
        f"is missing: the document names no server, and {which} operations cannot be called"
        f" without. Set it in [openapi.{name}]"
    )
    return [Skipped("base_url", reason)]


def service_config(name: str, entry: OpenAPIEntry, file: ConfigFile) -> HTTPServiceConfig:
    """Return the config of the importer, with its secrets.

    Raises:
        ConfigError: If a secret cannot be read.
    """
    short: dict[str, Any] = {"namespace": name}
    if "concurrency" not in entry.options:
        short["concurrency"] = per_source(file)
    if entry.scopes:
        short["access"] = AccessControl(entry.scopes)
    if entry.pages:
        short["pagination"] = "document"
    return HTTPServiceConfig(**file.options(HTTPServiceConfig, entry), **short)
