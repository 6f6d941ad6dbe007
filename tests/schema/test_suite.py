"""`check` against the JSON Schema Test Suite: drafts 2020-12, 7 and 4, all that is required of a validator.

Every case is also cast and explained: what the suite calls valid stays valid, what it calls invalid has a reason.
"""

import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
from tests.schema.material import SUITE

from operations.base.errors import SchemaError
from operations.schema import CastPolicy, Schema

DRAFTS = {
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft4": "http://json-schema.org/draft-04/schema#",
}

REMOTE = "http://localhost:1234/"
"""The address of the documents that schemas of the suite fetch. Nothing is fetched here, so such schemas are
rejected."""

DEVIATIONS = {
    (
        "draft2020-12",
        "vocabulary",
        "schema that uses custom metaschema with with no validation vocabulary",
        "no validation: invalid number, but it still validates",
    ): "a meta-schema is not fetched, so it cannot disable vocabularies",
}
"""Differences from the suite, with the reasons."""

POLICIES: tuple[CastPolicy, ...] = ("cast", "keep", "create")

GROUPS = sorted(
    (draft, path.stem) for draft in DRAFTS for path in (SUITE / "tests" / draft).glob("*.json")
)


@cache
def _cases(draft: str, group: str) -> list[dict[str, Any]]:
    path = SUITE / "tests" / draft / f"{group}.json"
    cases: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return cases


def _tests(draft: str, group: str) -> Iterator[tuple[str, Schema, dict[str, Any]]]:
    for case in _cases(draft, group):
        document = case["schema"]
        if isinstance(document, dict):
            document = {"$schema": DRAFTS[draft], **document}
        if REMOTE in json.dumps(document).replace(f'"$id": "{REMOTE}', "").replace(
            f'"id": "{REMOTE}', ""
        ):
            continue
        schema = Schema(document)
        try:
            schema.compile()
        except SchemaError as error:
            if REMOTE not in str(error):
                raise
            # It refers to a document on the suite's own server.
            continue
        for test in case["tests"]:
            yield case["description"], schema, test


pytestmark = pytest.mark.skipif(not GROUPS, reason="the JSON Schema Test Suite is not here")


@pytest.mark.parametrize(("draft", "group"), GROUPS)
def test_values_are_checked_explained_and_cast_as_the_suite_requires(
    draft: str, group: str
) -> None:
    for description, schema, test in _tests(draft, group):
        key = draft, group, description, test["description"]
        verdict = schema.check(test["data"])
        if key in DEVIATIONS:
            assert verdict is not test["valid"], "a known deviation is gone: take it off the list"
        else:
            assert verdict is test["valid"], key
        assert bool(schema.errors(test["data"])) is not verdict, key
        before = json.dumps(test["data"])
        for policy in POLICIES:
            result = schema.cast(test["data"], policy)
            again = schema.cast(result.value, policy)

            assert json.dumps(test["data"]) == before
            assert json.dumps(again.value) == json.dumps(result.value), (key, policy)
            if verdict:
                assert schema.check(result.value), (key, policy)
                # A float for an integer is valid, but written as an integer.
                kinds = {change.kind for change in result.changes}
                assert kinds <= {"converted", "stripped", "filled"}, (key, policy)


@pytest.mark.requirement("R04")
def test_references_to_the_test_suites_server_are_rejected_at_once() -> None:
    refused = 0
    for draft, group in GROUPS:
        if group == "refRemote":
            for case in _cases(draft, group):
                with pytest.raises(SchemaError):
                    Schema({"$schema": DRAFTS[draft], **case["schema"]}).compile()
                refused += 1

    assert refused > 20
