"""Scripts: their names and types, their calls, their errors, their results."""

import ast
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tests.code_mode.shop import BUYER, GUEST, OPERATOR, Meeting, run, shop

from operations import (
    CallError,
    ErrorCode,
    ErrorDefinition,
    Operation,
    OperationContext,
    OperationRegistry,
    OperationSpec,
    OperationType,
    from_schema,
    operation,
)
from operations.code import CodeLimits
from operations.contract.events import CallStarted


async def refused(script: str, context: OperationContext = OPERATOR, **options: Any) -> CallError:
    async with shop(**options) as registry:
        return await refused_by(registry, script, context)


async def refused_by(
    registry: OperationRegistry,
    script: str,
    context: OperationContext = OPERATOR,
    *,
    check_only: bool = False,
) -> CallError:
    with pytest.raises(CallError) as caught:
        await registry.execute("code.run", {"script": script, "check_only": check_only}, context)
    return caught.value


async def test_a_script_calls_operations_and_returns_a_value() -> None:
    script = (
        "found = await shop.items(limit=2, kind='pen')\nreturn [each['name'] for each in found]"
    )
    async with shop() as registry:
        assert await run(registry, script) == ["pen 0", "pen 1"]


async def test_the_last_expression_is_the_result() -> None:
    async with shop() as registry:
        assert await run(registry, "x = 1 + 1\nx") == 2


async def test_printed_text_and_the_number_of_calls_are_returned() -> None:
    async with shop() as registry:
        script = "print('a')\nawait shop.items()\nprint('b')"
        result = (await registry.execute("code.run", {"script": script}, OPERATOR)).data
    assert (result["printed"], result["calls"]) == ("a\nb\n", 1)


async def test_gathered_calls_run_at_the_same_time_within_the_limit() -> None:
    meeting = Meeting(3)
    script = (
        "import asyncio\nreturn await asyncio.gather(*(meeting.join(number=n) for n in range(6)))"
    )
    async with shop(meeting.operation, limits=CodeLimits(concurrent=3)) as registry:
        assert await run(registry, script) == [0, 1, 2, 3, 4, 5]
    assert meeting.most == 3


async def test_a_declared_error_is_an_exception_of_its_own_class() -> None:
    script = (
        "try:\n    await shop.order(item=13)\n"
        "except AccessDenied:\n    return 'no'\n"
        "except OutOfStock as error:\n    return error_of(error)"
    )
    async with shop() as registry:
        assert await run(registry, script, BUYER) == {
            "code": "OUT_OF_STOCK",
            "message": "none is left details: [1]",
            "details": {"left": 0},
        }


async def test_every_error_of_a_call_is_a_call_error() -> None:
    script = "try:\n    await shop.order(item=13)\nexcept CallError as e:\n    return error_of(e)['code']"
    async with shop() as registry:
        assert await run(registry, script, BUYER) == "OUT_OF_STOCK"


async def test_an_error_that_is_not_caught_names_its_line_and_the_mutations_before() -> None:
    error = await refused("await shop.order(item=1)\nawait shop.order(item=13)", BUYER)
    assert error.code == "SCRIPT_FAILED"
    assert error.details["line"] == 2
    assert error.details["cause"] == {"code": "OUT_OF_STOCK", "details": {"left": 0}}
    assert error.details["ran"] == [{"operation": "shop.order", "outcome": "success", "line": 1}]


async def test_an_exception_of_the_script_is_an_error_with_its_trace() -> None:
    error = await refused("def f():\n    return {}['a']\nf()")
    assert (error.code, error.details["error"], error.details["line"]) == (
        "SCRIPT_FAILED",
        "KeyError",
        2,
    )
    assert "line 3" in error.details["trace"]


@pytest.mark.parametrize(
    ("script", "line", "words"),
    [
        ("await shop.items(limit='a')", 1, "Expected `int`"),
        ("x = 1\nawait shop.itmes()", 2, 'Did you mean "items"?'),
        ("(await shop.items())[0]['nme']", 1, 'did you mean "name"'),
        ("import shop", 1, "remove the import"),
        ("import requests", 1, "only some modules"),
        ("import asyncio\nasyncio.create_task(shop.items())", 2, "only gather, run and sleep"),
        ("shop.items(limit=1)[0]", 1, "await"),
        ("await shop.items(kind='pencil')", 1, "pen"),
        ("await shopp.items()", 1, 'Did you mean "shop"?'),
        ("shop = await shop.items()", 1, "choose another name"),
    ],
)
async def test_a_script_is_checked_before_its_first_call(
    script: str, line: int, words: str
) -> None:
    calls: list[str] = []
    async with shop() as registry:
        registry.observe(
            lambda event: (
                calls.append(event.operation_id) if isinstance(event, CallStarted) else None
            )
        )
        for check_only in (True, False):
            value = {"script": f"{script}\n", "check_only": check_only}
            with pytest.raises(CallError) as caught:
                await registry.execute("code.run", value, OPERATOR)
            found = caught.value.details["diagnostics"]
            assert caught.value.code == "SCRIPT_REJECTED"
            assert found[0]["line"] == line
            assert words in f"{found[0]['message']} {found[0].get('hint')}"
    assert calls == ["code.run"] * 2


async def test_a_check_runs_nothing() -> None:
    async with shop() as registry:
        value = {"script": "print('no')\nawait shop.order(item=13)\n1/0", "check_only": True}
        data = (await registry.execute("code.run", value, OPERATOR)).data
    assert data == {"result": None, "printed": "", "calls": 0, "warnings": []}


async def test_a_call_that_is_not_awaited_does_not_run() -> None:
    calls: list[str] = []
    async with shop() as registry:
        registry.observe(
            lambda event: (
                calls.append(event.operation_id) if isinstance(event, CallStarted) else None
            )
        )
        value = {"script": "pending = shop.order(item=1)\nreturn 1"}
        data = (await registry.execute("code.run", value, OPERATOR)).data
    assert calls == ["code.run"]
    assert "line 1 was never awaited" in data["warnings"][0]


async def test_each_call_has_the_access_of_the_caller() -> None:
    script = "try:\n    await eval('shop').order(item=1)\nexcept CallError as e:\n    return error_of(e)['code']"
    async with shop() as registry:
        assert await run(registry, script, GUEST) == ErrorCode.OPERATION_NOT_FOUND


async def test_scripts_have_no_authority_in_a_registry_that_trusts_nested_calls() -> None:
    script = "try:\n    await eval('shop').refund(order=1)\nexcept CallError as e:\n    return error_of(e)['code']"
    async with shop(calls=("*",)) as registry:
        assert await run(registry, script, BUYER) == ErrorCode.OPERATION_NOT_FOUND


async def test_a_hidden_operation_and_an_unknown_one_look_the_same() -> None:
    script = (
        "found = []\nfor name in ('refund', 'nothing'):\n"
        "    try:\n        await eval('shop.' + name)(order=1)\n"
        "    except CallError as e:\n        found.append(str(e).replace(name, 'X'))\n"
        "    except AttributeError as e:\n        found.append('attribute')\n"
        "    try:\n        await eval('shop.' + name + '(order=1)')\n"
        "    except CallError as e:\n        found.append(str(e).replace(name, 'X'))\n"
        "return found"
    )
    async with shop() as registry:
        found = await run(registry, script, BUYER)
    assert found[1] == found[3]
    assert found[1].startswith("OPERATION_NOT_FOUND")


async def test_arguments_are_converted_as_for_every_model() -> None:
    async with shop() as registry:
        assert len(await run(registry, "return await shop.items(limit=eval('\"2\"'))")) == 2


async def test_values_of_python_become_json() -> None:
    script = (
        "import datetime, decimal\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass Point:\n    x: int\n"
        "return await shop.echo(value={'day': datetime.date(2026, 1, 2), 'sum': decimal.Decimal('1.5'),"
        " 'point': Point(1), 'pair': (1, 2), 3: None})"
    )
    async with shop() as registry:
        assert await run(registry, script) == {
            "day": "2026-01-02",
            "sum": 1.5,
            "point": {"x": 1},
            "pair": [1, 2],
            "3": None,
        }


@pytest.mark.parametrize("value", ["print", "shop", "shop.items", "ValueError('x')"])
async def test_other_values_are_no_input_and_no_result(value: str) -> None:
    error = await refused(f"await shop.echo(value={value})")
    assert error.details["cause"]["code"] == ErrorCode.VALIDATION_ERROR
    error = await refused(f"return [{value}]")
    assert error.code == ErrorCode.VALIDATION_ERROR


async def test_a_subscription_is_a_bounded_list() -> None:
    async with shop() as registry:
        assert await run(registry, "return await shop.ticks(count=5, max_items=2)") == [0, 1]
        assert await run(registry, "return await shop.ticks(count=2)") == [0, 1]


async def test_names_that_are_no_identifiers_have_a_form_in_python() -> None:
    @operation("my-api.get.list-all", type="query")
    async def listed(limit: int = 1) -> int:
        return limit

    @operation("json.load", type="query")
    async def load() -> str:
        return "loaded"

    async with shop(listed, load) as registry:
        found = await registry.execute("code.search", {"query": "list all"}, OPERATOR)
        assert "my_api: " in found.data["stubs"]
        assert await run(registry, "return await my_api.get_list_all(limit=3)") == 3
        assert (
            await run(registry, "import json\nreturn json.dumps(await json_.load())") == '"loaded"'
        )


async def test_a_search_returns_valid_stubs_of_the_best_matches_within_the_budget() -> None:
    async with shop() as registry:
        value = {"query": "order an item", "tokens": 100}
        found = (await registry.execute("code.search", value, BUYER)).data
    tree = ast.parse(found["stubs"])
    methods = [node.name for node in ast.walk(tree) if isinstance(node, ast.AsyncFunctionDef)]
    assert methods[0] == "order"
    assert len(found["stubs"]) <= 100 * 4
    assert "class OutOfStock(CallError)" in found["stubs"]


async def test_a_search_does_not_show_hidden_operations() -> None:
    async with shop() as registry:
        for query in ("refund order", ""):
            found = (await registry.execute("code.search", {"query": query}, BUYER)).data
            assert "refund" not in str(found)


async def test_stubs_of_a_recursive_schema_are_checked() -> None:
    schema: Any = {
        "$ref": "#/$defs/Node",
        "$defs": {
            "Node": {
                "type": "object",
                "properties": {
                    "next": {"anyOf": [{"$ref": "#/$defs/Node"}, {"type": "null"}]},
                    "class": {"type": "string"},
                },
                "required": ["next", "class"],
            }
        },
    }

    spec = OperationSpec(
        namespace="tree", name="root", version="1", type=OperationType.QUERY, description="",
        input_schema=from_schema(True), output_schema=from_schema(schema),
    )  # fmt: skip

    async def root(_input: Any, _context: OperationContext) -> Any:
        return {"next": {"next": None, "class": "b"}, "class": "a"}

    async with shop(Operation(spec, root)) as registry:
        script = "node = await tree.root()\nfollowing = node['next']\nassert following\nreturn following['class']"
        assert await run(registry, script) == "b"


async def test_the_nested_calls_form_a_tree() -> None:
    started: list[CallStarted] = []
    async with shop() as registry:
        registry.observe(
            lambda event: started.append(event) if isinstance(event, CallStarted) else None
        )
        await run(registry, "await shop.items()\nawait shop.echo(value=1)")
    root, *nested = started
    assert root.operation_id == "code.run"
    assert [each.operation_id for each in nested] == ["shop.items", "shop.echo"]
    assert {each.parent_request_id for each in nested} == {root.request_id}


async def test_the_stubs_of_a_large_result_fit_the_budget_with_shallow_types() -> None:
    schema: Any = {"type": "string"}
    for depth in range(6):
        schema = {
            "type": "object",
            "properties": {f"field_{depth}_{number}": schema for number in range(3)},
        }
    spec = OperationSpec(
        namespace="large", name="get", version="1", type=OperationType.QUERY,
        input_schema=from_schema(True), output_schema=from_schema(schema),
    )  # fmt: skip

    async def get(_input: Any, _context: OperationContext) -> Any:
        return {}

    async with shop(Operation(spec, get)) as registry:
        value = {"query": "large get", "tokens": 300}
        found = (await registry.execute("code.search", value, OPERATOR)).data["stubs"]
    ast.parse(found)
    assert "field_5_0" in found
    assert "dict[str, Any]" in found
    assert len(found) <= 300 * 4


async def test_neither_a_hidden_subscription_nor_wrong_arguments_reveal_an_operation() -> None:
    @operation("shop.orders", scopes=["admin"])
    async def orders(count: int) -> AsyncIterator[int]:
        """Follow the orders."""
        yield count

    script = (
        "found = []\nfor call in ('(count=1)', '(1, 2)', '(count=1, max_items=None)', '(count={1: object})'):\n"
        "    for name in ('orders', 'refund', 'nothing'):\n"
        "        try:\n            await eval('shop.' + name + call)\n"
        "        except CallError as e:\n            found.append(str(e).replace(name, 'X'))\n"
        "return found"
    )
    async with shop(orders) as registry:
        found = await run(registry, script, BUYER)
    assert len(found) == 12
    assert set(found) == {found[2]}
    assert found[2].startswith("OPERATION_NOT_FOUND")


async def test_the_input_of_a_subscription_is_converted_as_for_every_model() -> None:
    async with shop() as registry:
        assert await run(registry, "return await eval('shop').ticks(count='2')") == [0, 1]


@pytest.mark.parametrize(
    "bound",
    [
        "max_items=float('nan')",
        "seconds=float('nan')",
        "seconds='x'",
        "max_items=-(10 ** 400)",
        "seconds=-(10 ** 400)",
    ],
)
async def test_the_bounds_of_a_subscription_must_be_numbers(bound: str) -> None:
    script = (
        f"try:\n    return await eval('shop').ticks(count=2, {bound})\n"
        "except CallError as e:\n    return error_of(e)['code']"
    )
    async with shop() as registry:
        assert await run(registry, script) == ErrorCode.VALIDATION_ERROR
        for most in ("float('inf')", "10 ** 400", "'5'"):
            call = f"return await eval('shop').ticks(count=2, max_items={most})"
            assert await run(registry, call) == [0, 1]


async def test_the_fields_of_an_exception_of_the_script_are_its_class_and_message() -> None:
    script = (
        "found = []\n"
        "for error in (ValueError('no such: thing'), KeyError('y'), ValueError('x\\ndetails: {')):\n"
        "    found.append(error_of(error))\n"
        "return found"
    )
    async with shop() as registry:
        first, second, third = await run(registry, script)
    assert first == {"code": "ValueError", "message": "no such: thing", "details": None}
    assert (second["code"], third["code"]) == ("KeyError", "ValueError")
    assert third["message"] == "x\ndetails: {"


@pytest.mark.parametrize(("count", "depth"), [(4, 40), (30, 8), (90, 2), (2_000, 1)])
async def test_large_unions_do_not_break_the_check(count: int, depth: int) -> None:
    document: Any = {"type": "integer"}
    for level in range(depth):
        options = [
            {"type": "object", "properties": {f"p{level}_{number}": {"type": "integer"}}}
            for number in range(count)
        ]
        document = {"anyOf": [{"type": "array", "items": document}, *options]}
    schema = from_schema({"type": "object", "properties": {"value": document}})
    spec = OperationSpec(
        namespace="big", name="union", version="1", type=OperationType.QUERY, input_schema=schema, output_schema=schema
    )  # fmt: skip

    async def handler(_input: Any, _context: OperationContext) -> Any:
        return {"value": 1}

    async with shop(Operation(spec, handler, output="off")) as registry:
        assert await run(registry, "return (await big.union(value=[]))['value']") == 1


async def test_a_rejected_import_is_the_only_error_of_a_script_that_returns() -> None:
    error = await refused("import heapq\nreturn 1")
    assert [each["line"] for each in error.details["diagnostics"]] == [1]


async def test_errors_with_the_names_of_types_do_not_change_the_stubs() -> None:
    codes = ("TYPED_DICT", "NOT_REQUIRED", "ERROR_FIELDS", "LITERAL", "ANY", "SHOP_OPERATIONS")

    @operation("shop.fail", errors=[ErrorDefinition(code, "It fails.") for code in codes])
    async def fail(code: str) -> None:
        """Fail."""
        raise CallError(code, "failed")

    async with shop(fail) as registry:
        found = (await registry.execute("code.search", {"query": "fail"}, OPERATOR)).data["stubs"]
        classes = re.findall(r'class (\w+)\(CallError\): "(\w+)"', found)
        assert {code for _, code in classes} >= set(codes)
        for name, code in classes:
            call = f"    await eval('shop').fail(code={code!r})"
            script = f"try:\n{call}\nexcept {name} as e:\n    return error_of(e)['code']"
            assert await run(registry, script) == code
        names = " ".join(name for name, _ in classes)
        # The types of other operations are checked as without these errors.
        with pytest.raises(CallError) as caught:
            await run(registry, f"# {names}\nreturn (await shop.items(limit='a'))[0]['nme']")
        assert "`int`" in str(caught.value)
        assert '"name"' in str(caught.value)
        with pytest.raises(CallError) as caught:
            await run(registry, f"# {names.split()[0]}\nawait shop.itmes()")
        assert 'Did you mean "items"?' in str(caught.value)


OTHER_ERRORS = (
    "1 / 0",
    "int('x')",
    "{}['a']",
    "[][0]",
    "None.x",
    "{} + 1",
    "decimal.Decimal('x')",
    "decimal.Decimal(1) / 0",
    "decimal.Decimal(0) / 0",
    "decimal.Decimal('1e999999') * 10",
    "open('x')",
    "os.listdir('/')",
    "os.getenv('HOME')",
    "pathlib.Path('x').read_text()",
    "json.loads('{')",
)


@pytest.mark.parametrize("names_decimal", [False, True])
async def test_call_error_catches_errors_of_calls_only(*, names_decimal: bool) -> None:
    lines = [each for each in OTHER_ERRORS if "decimal" not in each or names_decimal]
    imports = "import json, os, pathlib" + (", decimal" if names_decimal else "")
    tries = "".join(
        f"try:\n    eval({each!r})\nexcept CallError as error:\n    caught.append({each!r})\n"
        f"except Exception:\n    others += 1\n"
        for each in lines
    )
    script = (
        f"{imports}\ncaught = []\nothers = 0\n{tries}"
        "try:\n    await shop.order(item=13)\nexcept CallError as error:\n    caught.append('call')\n"
        "return [caught, others]"
    )
    async with shop() as registry:
        assert await run(registry, script, BUYER) == [["call"], len(lines)]


async def test_call_error_does_not_catch_decimal_errors_of_traps() -> None:
    script = (
        "import decimal\nfound = []\n"
        "for trap in (decimal.Inexact, decimal.Rounded):\n"
        "    decimal.getcontext().traps[trap] = True\n"
        "    try:\n        decimal.Decimal(1) / 3\n"
        "    except CallError:\n        found.append('call')\n"
        "    except decimal.DecimalException:\n        found.append('decimal')\n"
        "return found"
    )
    async with shop() as registry:
        assert await run(registry, script) == ["decimal", "decimal"]


@pytest.mark.parametrize(("prefix", "count"), [("", 7), ("import decimal\n", 5)])
async def test_each_class_catches_its_own_errors_only(prefix: str, count: int) -> None:
    codes = [f"FAULT_{letter}" for letter in "ABCDEFG"[:count]]

    @operation("shop.fail", errors=[ErrorDefinition(code, "It fails.") for code in codes])
    async def fail(code: str) -> None:
        raise CallError(code, "failed")

    foreign = "ZeroDivisionError, TypeError, ValueError, LookupError, RuntimeError"
    clauses = "".join(
        f"    except Fault{code[-1]}:\n        found.append({code!r})\n" for code in codes
    )
    script = (
        f"{prefix}found = []\nfor code in {codes!r} + ['OTHER']:\n"
        f"    try:\n        await shop.fail(code=code)\n    except ({foreign}):\n        found.append('foreign')\n"
        f"{clauses}    except CallError as error:\n        found.append(error_of(error)['code'])\n"
        "return found"
    )
    async with shop(fail) as registry:
        assert await run(registry, script) == [*codes, "OTHER"]
        many = script.replace("return found", "return found  # AccessDenied")
        error = await refused_by(registry, many)
    assert error.details == {"limit": "errors"}


async def test_traces_have_the_names_of_the_script() -> None:
    for prefix in ("", "import decimal\n"):
        for name in ("OutOfStock", "CallError"):
            unused = f"{prefix}# {name}\nawait shop.order(item=13)"
            error = await refused(unused, BUYER)
            assert error.details["error"] == name
            assert "Error:" not in str(error).replace("CallError:", "")


@pytest.mark.parametrize(
    ("call", "is_rejected"),
    [
        ("asyncio.gather(*calls, return_exceptions=True)", True),
        (
            "asyncio.gather(\n    *[each for each in calls],\n    return_exceptions = False,\n)",
            True,
        ),
        ("gather(*calls, return_exceptions=True)", True),
        ("asyncio.gather(*calls)", False),
        ("asyncio.gather(*[shop.echo(value='gather(return_exceptions=True)')])", False),
        ("asyncio.gather(*[shop.echo(value=dict(return_exceptions=True))])", False),
        ("asyncio.gather(*calls)  # return_exceptions=True", False),
        (
            "asyncio.gather(*[shop.echo(value='''it's\nasyncio.gather(return_exceptions=1)''')])",
            False,
        ),
        ("asyncio.gather(*[shop.echo(value='\\'')], return_exceptions=True)", True),
    ],
)
async def test_gather_with_return_exceptions_is_rejected_before_the_first_call(
    call: str, *, is_rejected: bool
) -> None:
    script = (
        "import asyncio\nfrom asyncio import gather\nawait shop.order(item=1)\n"
        f"calls = [shop.items(limit=1)]\nreturn await {call}"
    )
    async with shop() as registry:
        if not is_rejected:
            assert len(await run(registry, script, BUYER)) == 1
            return
        error = await refused_by(registry, script, BUYER)
        (found,) = error.details["diagnostics"]
        checked = await refused_by(registry, script, BUYER, check_only=True)
    assert error.code == checked.code == "SCRIPT_REJECTED"
    assert found["line"] == (7 if "\n" in call else 5)
    assert "return_exceptions" in found["message"]
    assert "Catch CallError in an async function" in found["hint"]


async def test_an_operation_may_be_called_gather() -> None:
    @operation("tasks.gather", type="query")
    async def collect(return_exceptions: bool) -> bool:
        return return_exceptions

    async with shop(collect) as registry:
        assert await run(registry, "return await tasks.gather(return_exceptions=True)") is True
        script = "def gather(return_exceptions=1):\n    return 2\nreturn gather()"
        assert await run(registry, script) == 2
