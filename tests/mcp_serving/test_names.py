import re

from hypothesis import given
from hypothesis import strategies as st

from operations import OperationSpec, OperationType
from operations.mcp.serving.names import NameStyle, tool_names


def spec(operation_id: str, **meta: str) -> OperationSpec:
    namespace, _, name = operation_id.partition(".")
    return OperationSpec(
        namespace=namespace, name=name, type=OperationType.QUERY, meta={"mcp": meta} if meta else {}
    )


def names(*ids: str, style: NameStyle = "full", reserved: tuple[str, ...] = ()) -> list[str]:
    return list(tool_names([spec(operation_id) for operation_id in ids], style, reserved=reserved))


def test_a_tool_is_called_by_the_operations_id() -> None:
    assert names("math.add") == ["math.add"]


def test_short_names_have_no_dots() -> None:
    assert names("task.list.open", style="short") == ["task_list_open"]


def test_names_that_fall_together_are_told_apart_by_a_hash_that_stays() -> None:
    together = names("a.b_c", "a_b.c", style="short")

    assert len(set(together)) == 2
    assert all(re.fullmatch(r"a_b_c_[0-9a-f]{8}", name) for name in together)
    assert together == list(reversed(names("a_b.c", "a.b_c", style="short")))


def test_an_operation_may_choose_its_name_but_none_of_the_gateways() -> None:
    chosen = tool_names(
        [spec("a.b", name="add"), spec("a.c", name="search")], "full", reserved=["search"]
    )

    added, searched = chosen
    assert added == "add"
    assert searched.startswith("search_")


ids = st.from_regex(r"[A-Za-z0-9_-]{1,128}\.[A-Za-z0-9_.-]{1,256}", fullmatch=True)


@given(st.lists(ids, unique=True, max_size=8))
def test_every_name_fits_and_is_its_own(several: list[str]) -> None:
    for style, pattern in (("full", r"[A-Za-z0-9_.-]{1,128}"), ("short", r"[A-Za-z0-9_-]{1,64}")):
        given_names = names(*several, style=style)  # type: ignore[arg-type]
        assert len(given_names) == len(several)
        assert all(re.fullmatch(pattern, name) for name in given_names)
