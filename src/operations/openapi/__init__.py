"""Import operations from OpenAPI documents, and export a registry as an OpenAPI document.

    service = await from_openapi_file("petstore.yaml", HTTPServiceConfig(namespace="petstore"))
    registry.register_all(service)

The `openapi` extra is needed to call imported operations (aiohttp) and to read YAML.
"""

from typing import TYPE_CHECKING

from operations.base.lazy import lazily

if TYPE_CHECKING:
    from operations.io.http.client import HTTPRequest, HTTPResponse, HTTPTransport
    from operations.io.sse import EventStreamDecoder, ServerSentEvent
    from operations.openapi.reading.document import Problem
    from operations.openapi.serving import to_openapi
    from operations.openapi.source.config import (
        BasicCredential,
        ClientCredentials,
        HTTPAuth,
        HTTPServiceConfig,
        OperationOutline,
        PasswordCredentials,
        RefreshToken,
        Select,
    )
    from operations.openapi.source.paging import (
        CursorPaging,
        LinkPaging,
        OffsetPaging,
        PagePaging,
        URLPaging,
    )
    from operations.openapi.source.service import (
        OpenAPIService,
        from_openapi,
        from_openapi_file,
        from_openapi_url,
    )

__getattr__ = lazily(
    __name__,
    {
        "operations.io.http.client": "HTTPRequest HTTPResponse HTTPTransport",
        "operations.io.sse": "EventStreamDecoder ServerSentEvent",
        "operations.openapi.reading.document": "Problem",
        "operations.openapi.serving": "to_openapi",
        "operations.openapi.source.config": (
            "BasicCredential ClientCredentials HTTPAuth"
            " HTTPServiceConfig OperationOutline PasswordCredentials RefreshToken Select"
        ),
        "operations.openapi.source.paging": "CursorPaging LinkPaging OffsetPaging PagePaging URLPaging",
        "operations.openapi.source.service": "OpenAPIService from_openapi from_openapi_file from_openapi_url",
    },
)

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
