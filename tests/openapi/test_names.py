"""Names are unique, safe, and do not depend on order."""

import re

from hypothesis import given, settings
from hypothesis import strategies as st

from operations.openapi.reading.model import MAX_NAME, operation_names
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
