"""Names are unique, safe, and do not depend on order."""

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.openapi.serving import document

from operations.openapi import HTTPServiceConfig, from_openapi
from operations.openapi.reading.model import MAX_NAME, operation_names, short_names
from operations.openapi.source.parameters import argument_names

SAFE = re.compile(r"[A-Za-z0-9_.-]{1,256}")
WORDS = st.sampled_from(
    ["", "a", "a/b", "a_b", "A", "..", "é", "get_x", "get_x_id", "x" * 300, " "]
)


def test_an_operation_id_is_kept_and_made_safe() -> None:
    wanted = [
        ("listPets", "GET", "/pets"),
        ("pets/show one", "GET", "/pets/{id}"),
        ("", "GET", "/users/{id}/posts"),
    ]
    assert operation_names(wanted) == ["listPets", "pets_show_one", "get_users_id_posts"]


def test_names_that_clash_get_method_and_path() -> None:
    wanted = [
        ("list", "GET", "/a"),
        ("list", "GET", "/b"),
        ("other", "GET", "/c"),
        ("get_a", "GET", "/d"),
    ]
    first, second, third, fourth = operation_names(wanted)
    assert (second, third, fourth) == ("get_b", "other", "get_a")
    assert first.startswith("get_a_")


def test_operations_at_the_root_path_are_named_by_method() -> None:
    assert operation_names([("", "GET", "/"), ("", "POST", "")]) == ["get", "post"]


@pytest.mark.parametrize(
    ("name", "method", "path", "short"),
    [
        ("delete_customer_customers__id__delete", "DELETE", "/customers/{id}", "delete_customer"),
        ("read_root__get", "GET", "/", "read_root"),
        ("list_users_v1_users_get", "GET", "/behind/proxy/v1/users", "list_users"),
        ("get_users__id__get", "POST", "/users/{id}", "get_users__id__get"),
        ("list_users_get", "GET", "/people", "list_users_get"),
        ("_users_get", "GET", "/users", "_users_get"),
        ("listUsers", "GET", "/users", "listUsers"),
    ],
)
def test_a_short_name_has_no_path_and_method_at_its_end(
    name: str, method: str, path: str, short: str
) -> None:
    assert short_names([(name, method, path)]) == [short]


def test_a_short_name_that_is_not_unique_is_not_used() -> None:
    wanted = [
        ("read_users_get", "GET", "/users"),
        ("read_items_get", "GET", "/items"),
        ("add_items_post", "POST", "/items"),
        ("drop_items_delete", "DELETE", "/items"),
        ("drop", "POST", "/drop"),
    ]
    assert short_names(wanted) == [
        "read_users_get", "read_items_get", "add", "drop_items_delete", "drop",
    ]  # fmt: skip


def test_short_operation_ids_are_opt_in() -> None:
    doc = document("/customers/{id}", "delete", operationId="drop_customer_customers__id__delete")

    def name(**options: Any) -> str:
        (operation,) = from_openapi(doc, HTTPServiceConfig(namespace="api", **options))
        return operation.spec.name

    assert name() == "drop_customer_customers__id__delete"
    assert name(operation_ids="short") == "drop_customer"
    assert name(operation_ids="short", rename={"drop_customer": "drop"}) == "drop"
    with pytest.raises(ValueError, match="operation_ids must be document or short"):
        name(operation_ids="brief")


@settings(deadline=None)
@given(
    operations=st.lists(
        st.tuples(WORDS, st.sampled_from(["GET", "PUT"]), st.sampled_from(["/x", "/x/{id}", "/x-id", "/x_id", "/é"])),
        unique_by=lambda operation: operation[1:],
    ),
    seed=st.randoms(),
)  # fmt: skip
def test_names_are_unique_safe_and_stable(
    operations: list[tuple[str, str, str]], seed: object
) -> None:
    names = operation_names(operations)
    assert len(set(names)) == len(names)
    assert all(SAFE.fullmatch(name) and len(name) <= MAX_NAME for name in names)
    shuffled = list(operations)
    seed.shuffle(shuffled)  # type: ignore[attr-defined]
    assert dict(zip(shuffled, operation_names(shuffled), strict=True)) == dict(
        zip(operations, names, strict=True)
    )


def test_arguments_with_the_same_name_get_their_place_as_suffix() -> None:
    parameters = [("id", "path"), ("id", "query"), ("q", "query"), ("body", "header")]
    assert argument_names(parameters, ["body"]) == ["id_path", "id_query", "q", "body_header"]
    assert argument_names([("a", "path"), ("a", "query"), ("a_path", "query")]) == [
        "a_path_",
        "a_query",
        "a_path",
    ]
