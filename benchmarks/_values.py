"""The two operations the core is measured with: a trivial one, and a realistic one."""

from typing import Any

import msgspec

STATUS = ["open", "closed", "archived"]

ADD_INPUT: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
ADD_OUTPUT: dict[str, Any] = {"type": "integer"}
ADD_ARGUMENTS = {"a": 2, "b": 3}


def _closed(required: str, **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


TEXT, INTEGER = {"type": "string"}, {"type": "integer"}

SEARCH_INPUT = _closed(
    "tenant query filter sort",
    tenant={"type": "string", "minLength": 1},
    query={"type": "string", "minLength": 1},
    limit={"type": "integer", "minimum": 1, "maximum": 100, "default": 20},
    offset={"type": "integer", "minimum": 0, "default": 0},
    archived={"type": "boolean", "default": False},
    locale={"type": "string", "default": "en"},
    trace={"type": ["string", "null"], "default": None},
    tags={"type": "array", "items": TEXT},
    filter=_closed(
        "status owner",
        status={"enum": STATUS},
        min_score={"type": "number", "default": 0.0},
        owner=_closed("id email", id=INTEGER, email=TEXT),
    ),
    sort=_closed("field", field=TEXT, descending={"type": "boolean", "default": False}),
)
SEARCH_OUTPUT: dict[str, Any] = {
    "type": "array",
    "items": _closed(
        "id name status score created tags active owner",
        id=INTEGER,
        name=TEXT,
        status={"enum": STATUS},
        score={"type": "number"},
        created=TEXT,
        tags={"type": "array", "items": TEXT},
        active={"type": "boolean", "default": True},
        owner={"type": ["string", "null"], "default": None},
    ),
}
SEARCH_ARGUMENTS: dict[str, Any] = {
    "tenant": "acme",
    "query": "invoices overdue",
    "limit": 20,
    "offset": 40,
    "archived": False,
    "locale": "en-GB",
    "trace": "4bf92f3577b34da6",
    "tags": ["finance", "q3", "eu"],
    "filter": {"status": "open", "min_score": 0.25, "owner": {"id": 77, "email": "o@example.org"}},
    "sort": {"field": "created", "descending": True},
}
ITEMS: list[dict[str, Any]] = [
    {
        "id": i,
        "name": f"invoice number {i}",
        "status": STATUS[i % 3],
        "score": i / 7,
        "created": "2026-01-02T03:04:05Z",
        "tags": ["finance", f"t{i}"],
        "active": i % 2 == 0,
        "owner": None if i % 5 else f"user{i}",
    }
    for i in range(20)
]
DIRTY = [
    {
        **{key: value for key, value in item.items() if key not in ("active", "owner")},
        "_internal": 1,
    }
    for item in ITEMS
]
"""The result of a careless handler: one undeclared property, and two missing properties that have defaults."""


def states(count: int = 100) -> dict[str, list[dict[str, Any]]]:
    """Return lists that normalisation has to change in different ways."""
    items = [{**ITEMS[index % len(ITEMS)], "id": index} for index in range(count)]
    wrong = {"status": "paused"}
    return {
        "valid": items,
        "stripped": [{**item, "_internal": 1} for item in items],
        "filled": [{key: item[key] for key in item if key != "active"} for item in items],
        "converted": [{**item, "id": str(item["id"])} for item in items],
        "1 % mismatched": [{**items[0], **wrong}, *items[1:]],
        "100 % mismatched": [{**item, **wrong} for item in items],
    }


WIDE = {
    "type": "array",
    "items": {
        "anyOf": [
            _closed("kind id", kind={"const": f"kind {index}"}, id=INTEGER) for index in range(200)
        ]
    },
}
"""A union of 200 members with a discriminator."""

WIDE_WRONG = [{"kind": f"kind {2 * index}", "id": "wrong"} for index in range(100)]

if __name__ == "__main__":
    print(msgspec.json.encode({"dirty": DIRTY, **states()}).decode())
