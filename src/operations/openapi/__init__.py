"""Import operations from OpenAPI documents, and export a registry as an OpenAPI document.

    service = await from_openapi_file("petstore.yaml", HTTPServiceConfig(namespace="petstore"))
    registry.register_all(service)

The `openapi` extra is needed to call imported operations (aiohttp) and to read YAML.
"""

from operations.openapi.config import (
    BasicCredential,
    ClientCredentials,
    HTTPAuth,
    HTTPServiceConfig,
    OperationOutline,
    PasswordCredentials,
    RefreshToken,
    Select,
)
from operations.openapi.exporting import to_openapi
from operations.openapi.paging import (
    CursorPaging,
    LinkPaging,
    OffsetPaging,
    PagePaging,
    URLPaging,
)
from operations.openapi.reading.document import Problem
from operations.openapi.service import (
    OpenAPIService,
    from_openapi,
    from_openapi_file,
    from_openapi_url,
)
from operations.openapi.streaming import EventStreamDecoder, ServerSentEvent
from operations.openapi.transport import HTTPRequest, HTTPResponse, HTTPTransport

__all__ = [
    "BasicCredential",
    "ClientCredentials",
    "CursorPaging",
    "EventStreamDecoder",
    "HTTPAuth",
    "HTTPRequest",
    "HTTPResponse",
    "HTTPServiceConfig",
    "HTTPTransport",
    "LinkPaging",
    "OffsetPaging",
    "OpenAPIService",
    "OperationOutline",
    "PagePaging",
    "PasswordCredentials",
    "Problem",
    "RefreshToken",
    "Select",
    "ServerSentEvent",
    "URLPaging",
    "from_openapi",
    "from_openapi_file",
    "from_openapi_url",
    "to_openapi",
]
