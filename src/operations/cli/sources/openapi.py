"""Operations of an HTTP API."""

from operations.access import AccessControl
from operations.cli.sources import Opened
from operations.config import ConfigFile, Secret
from operations.config.model import Credential, OpenAPIEntry, Selection
from operations.openapi import (
    BasicCredential,
    ClientCredentials,
    HTTPAuth,
    HTTPServiceConfig,
    OpenAPIService,
    RefreshToken,
    Select,
    from_openapi_file,
    from_openapi_url,
)
from operations.openapi.config import OAuthClient
from operations.scanner import Skipped


async def open_service(name: str, entry: OpenAPIEntry, file: ConfigFile) -> Opened:
    """Read an API's document and make its operations.

    Raises:
        ConfigError: If the document or a secret is not where the config says.
        DocumentError: If the document cannot be read.
    """
    config = service_config(name, entry, file)
    if "://" in entry.document:
        service = await from_openapi_url(entry.document, config)
    else:
        path = file.existing(entry.document, f"openapi.{name}.document")
        service = await from_openapi_file(path, config)
    return Opened(
        operations=service,
        origin=entry.document,
        skipped=[Skipped(problem.where, problem.reason) for problem in service.problems],
        doubts=_doubts(name, service),
        title=service.title or "",
    )


def _doubts(name: str, service: OpenAPIService) -> list[Skipped]:
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
    """What the importer is told, with the secrets in it.

    Raises:
        ConfigError: If a secret is not where the config says.
    """
    auth = entry.auth
    return HTTPServiceConfig(
        namespace=name,
        base_url=entry.base_url,
        headers={key: text_of(value, file) for key, value in entry.headers.items()},
        auth=None
        if auth is None
        else HTTPAuth(
            type=auth.type,
            token=file.secret(auth.token),
            header_name=auth.header_name,
            prefix=auth.prefix,
        ),
        credentials={key: _credential(each, file) for key, each in entry.credentials.items()},
        timeout=entry.timeout,
        retries=entry.retries,
        access=AccessControl(entry.scopes) if entry.scopes else None,
        allowed_hosts=entry.allowed_hosts,
        server_variables=entry.server_variables,
        include=_select(entry.include),
        exclude=_select(entry.exclude),
        rename=entry.rename or None,
        pagination="document" if entry.pages else None,
        flatten_body=entry.flatten_body,
        follow_redirects=entry.follow_redirects,
        restore=entry.restore,
    )


def text_of(value: str | Secret, file: ConfigFile) -> str:
    """A value that may be a secret."""
    return file.secret(value) if isinstance(value, Secret) else value


def _select(selection: Selection | None) -> Select | None:
    if selection is None:
        return None
    return Select(tags=selection.tags, paths=selection.paths, methods=selection.methods)


def _credential(entry: Credential, file: ConfigFile) -> str | BasicCredential | OAuthClient:
    if entry.username is not None:
        password = "" if entry.password is None else file.secret(entry.password)
        return BasicCredential(username=entry.username, password=password)
    if entry.client_id is not None and entry.refresh_token is not None:
        return RefreshToken(
            client_id=entry.client_id,
            client_secret="" if entry.client_secret is None else file.secret(entry.client_secret),
            refresh_token=file.secret(entry.refresh_token),
            token_url=entry.token_url,
            scopes=entry.scopes,
        )
    if entry.client_id is not None and entry.client_secret is not None:
        return ClientCredentials(
            client_id=entry.client_id,
            client_secret=file.secret(entry.client_secret),
            token_url=entry.token_url,
            scopes=entry.scopes,
        )
    return file.secret(Secret(env=entry.env, file=entry.file))
