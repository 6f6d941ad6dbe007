"""A small REST API with an OpenAPI document, for the demo."""

from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from operations.types import JSONObject

_ITEM: JSONObject = {
    "type": "object",
    "required": ["id", "name", "price"],
    "properties": {
        "id": {"type": "integer"},
        "name": {"type": "string"},
        "price": {"type": "number", "description": "In euros."},
    },
}

DOCUMENT: JSONObject = {
    "openapi": "3.1.0",
    "info": {"title": "The shop", "version": "1.0.0"},
    "paths": {
        "/items": {
            "get": {
                "operationId": "list_items",
                "summary": "Everything on the menu",
                "tags": ["menu"],
                "responses": {
                    "200": {
                        "description": "The menu.",
                        "content": {
                            "application/json": {"schema": {"type": "array", "items": _ITEM}}
                        },
                    }
                },
            }
        },
        "/items/{id}": {
            "get": {
                "operationId": "get_item",
                "summary": "One item of the menu",
                "tags": ["menu"],
                "parameters": [
                    {"name": "id", "in": "path", "required": True, "schema": {"type": "integer"}}
                ],
                "responses": {
                    "200": {
                        "description": "The item.",
                        "content": {"application/json": {"schema": _ITEM}},
                    },
                    "404": {"description": "There is no such item."},
                },
            }
        },
    },
}

_MENU: list[dict[str, Any]] = [
    {"id": 1, "name": "Espresso", "price": 2.2},
    {"id": 2, "name": "Flat white", "price": 3.8},
    {"id": 3, "name": "Apple cake", "price": 4.5},
]


async def _document(_: Request) -> JSONResponse:
    return JSONResponse(DOCUMENT)


async def _items(_: Request) -> JSONResponse:
    return JSONResponse(_MENU)


async def _item(request: Request) -> JSONResponse:
    wanted: int = request.path_params["id"]
    for item in _MENU:
        if item["id"] == wanted:
            return JSONResponse(item)
    return JSONResponse({"detail": f"there is no item {wanted}"}, status_code=404)


def build_api() -> Starlette:
    """The API as an ASGI application."""
    return Starlette(
        routes=[
            Route("/openapi.json", _document),
            Route("/items", _items),
            Route("/items/{id:int}", _item),
        ]
    )
