"""Import a document: `from_openapi`, `from_openapi_file` and `from_openapi_url`.

service = from_openapi(document, HTTPServiceConfig(namespace="petstore"))
registry.register_all(service)
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from functools import cached_property, partial
from os import PathLike
from pathlib import Path
from typing import Any, Self, TypeAlias, cast

import msgspec

from operations.base.errors import CallError, DocumentError
from operations.base.json.values import LONE_SURROGATE, is_list, is_object, text_of
from operations.base.text import counted, without_secrets
from operations.base.types import JSONObject
from operations.contract.context import NO_CALL
from operations.contract.specs import Operation
from operations.io.hosts import TrustedHosts
from operations.openapi.reading.document import Description, Problem
from operations.openapi.reading.files import (
    Bundle,
    DocumentLimits,
    bundle_files,
    bundle_urls,
    shown_location,
)
from operations.openapi.reading.memory import MemoryBudget
from operations.openapi.source.client import ServiceClient
from operations.openapi.source.config import HTTPServiceConfig
from operations.openapi.source.endpoint import Endpoint
from operations.openapi.source.importing import Importer

Read: TypeAlias = Callable[[str], "bytes | str | Awaitable[bytes | str]"]
"""Reads a file by its path: `read=`."""


class OpenAPIService:
    """The operations of one HTTP API, and their connections.

    Iterate it for the operations. Connections open with the first call, and close with `aclose` or at the end of an
    `async with` block. Closing twice is harmless.

    Attributes:
        operations: The imported operations.
        title: The title of the document.
        version: The version of the API in the document.
        description: The document.
    """

    def __init__(
        self,
        operations: list[Operation],
        description: Description,
        client: ServiceClient,
    ) -> None:
        self.operations = operations
        self.description = description
        self.title = description.title
        self.version = text_of(description.info.get("version"))
        self._client = client

    @property
    def problems(self) -> list[Problem]:
        """All parts of the document that could not be used, including unresolved references, with the reason.

        The first access searches the whole document for unresolved references.
        """
        return self.description.all_problems

    @cached_property
    def unaddressed(self) -> list[str]:
        """The ids of operations that need `base_url`, because the document declares no server for them."""
        return [each.spec.id for each, endpoint in self.endpoints() if not endpoint.has_address]

    def __iter__(self) -> Iterator[Operation]:
        return iter(self.operations)

    def __len__(self) -> int:
        return len(self.operations)

    @property
    def calls(self) -> int:
        """The number of running and waiting calls."""
        return self._client.bulkhead.calls

    def limit_calls(self, concurrency: int) -> None:
        """Change the number of concurrent calls."""
        self._client.bulkhead.resize(concurrency)

    def endpoints(self) -> Iterator[tuple[Operation, Endpoint]]:
        """Yield each operation of the document, with its description."""
        for operation in self.operations:
            endpoint = getattr(operation.handler, "__self__", None)
            if isinstance(endpoint, Endpoint):
                yield operation, endpoint

    def __repr__(self) -> str:
        return f"<OpenAPIService {self.title!r} of {counted(len(self), 'operation')}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close every connection."""
        await self._client.aclose()


def from_openapi(document: Any, config: HTTPServiceConfig | Mapping[str, Any]) -> OpenAPIService:
    """Create an operation for every path and method of a decoded document.

    Only the given document is read: references to other files or addresses stay unresolved.

    Args:
        document: OpenAPI 3.0 to 3.2, or Swagger 2.0, decoded. It must not be modified afterwards.
        config: The address, credentials and selection of operations; or a mapping with the fields of
            `HTTPServiceConfig`.

    Raises:
        DocumentError: If it is not an object, or contains text that is not valid Unicode.
        ValueError: If the configuration is not valid.
    """
    if isinstance(document, (str, bytes, PathLike)):
        raise DocumentError(
            "from_openapi takes a decoded document: from_openapi_file and from_openapi_url read one"
        )
    try:
        size = _encoded_size(document)
    except UnicodeEncodeError:
        raise DocumentError(f"the document {LONE_SURROGATE}") from None
    return _import(Bundle(document, memory=MemoryBudget(size)), _config(config), None, None)


async def from_openapi_file(
    path: str | Path, config: HTTPServiceConfig | Mapping[str, Any], read: Read | None = None
) -> OpenAPIService:
    """Import a JSON or YAML file, and the files that it refers to, as `from_openapi` does.

    Args:
        path: The document.
        config: As for `from_openapi`; `document_root` sets the folder that references may reach.
        read: Reads a file by its path, instead of the file system; may be a coroutine function.

    Raises:
        DocumentError: If a file cannot be read, is too large, or is neither JSON nor YAML.
        ValueError: If the configuration is not valid.
    """
    config = _config(config)
    document = await bundle_files(
        Path(path), read, root=config.document_root, limits=_limits(config)
    )
    return await asyncio.to_thread(_import, document, config, None, str(path))


async def from_openapi_url(
    url: str, config: HTTPServiceConfig | Mapping[str, Any]
) -> OpenAPIService:
    """Import a document at an address, and the documents that it refers to, as `from_openapi` does.

    The address may be private. The origin of the document may receive credentials in later requests. The request for
    the document itself has `headers` and `auth` only if `sign_documents` is set, and never has `credentials`, which
    depend on the document.

    Raises:
        DocumentError: If a document cannot be fetched, is too large, or is neither JSON nor YAML.
        ValueError: If the configuration is not valid.
    """
    config = _config(config)
    try:
        trusted = TrustedHosts([url])
    except ValueError as error:
        raise DocumentError(
            f"{without_secrets(url)!r} is {error}: download the document, and name the file"
        ) from None
    client = ServiceClient(config, trusted, url)
    try:
        headers: dict[str, str] = {}
        if config.sign_documents:
            security = client.security
            headers = (await security.sign(security.plan(None), NO_CALL)).headers
        fetch = partial(client.download, headers=headers)
        document = await bundle_urls(url, fetch, limits=_limits(config))
    except CallError as error:
        raise DocumentError(f"{without_secrets(url)} cannot be fetched: {error.message}") from error
    finally:
        await client.aclose()
    return await asyncio.to_thread(_import, document, config, url, url)


def _encoded_size(document: Any) -> int:
    """Return about how many bytes a document has; values that are not JSON cost only their own part.

    Raises:
        UnicodeEncodeError: For a lone surrogate, which the `json` module accepts.
    """
    # Much faster than the loop, but stops at the first value that is not JSON. One operation or schema at a time:
    # the whole text would take more memory than the operations of the document.
    with suppress(TypeError, OverflowError, RecursionError):
        return _packed_size(document, bytearray(), _SIZED_LEVELS)
    size = 0
    seen: set[int] = set()
    stack = [document]
    while stack:
        node = stack.pop()
        size += 1
        if isinstance(node, str):
            size += len(node.encode())
        elif (is_object(node) or is_list(node)) and id(node) not in seen:
            seen.add(id(node))
            stack.extend(node)
            if is_object(node):
                stack.extend(node.values())
    return size


def _packed_size(value: Any, buffer: bytearray, levels: int) -> int:
    if levels and type(value) is dict:
        parts = cast("JSONObject", value)
        return sum(
            len(_PACKER.encode(key)) + _packed_size(part, buffer, levels - 1)
            for key, part in parts.items()
        )
    _PACKER.encode_into(value, buffer)
    return len(buffer)


_PACKER = msgspec.msgpack.Encoder()
_SIZED_LEVELS = 2
"""The levels of a document above its path items and schemas."""


def _config(config: HTTPServiceConfig | Mapping[str, Any]) -> HTTPServiceConfig:
    return HTTPServiceConfig.from_entry(config) if isinstance(config, Mapping) else config


def _limits(config: HTTPServiceConfig) -> DocumentLimits:
    return DocumentLimits(config.max_document_bytes, config.max_document_files)


def _import(
    bundle: Bundle, config: HTTPServiceConfig, address: str | None, source: str | None
) -> OpenAPIService:
    try:
        importer = Importer(bundle, config, address=address, source=source)
        operations = importer.operations()
        return OpenAPIService(operations, importer.description, importer.client)
    except DocumentError as error:
        if source is None:
            raise
        raise DocumentError(f"{shown_location(source)}: {error}") from None
