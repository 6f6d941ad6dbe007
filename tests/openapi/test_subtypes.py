"""Schemas that extend a base with a discriminator: callers see them, and their data arrives whole."""

from typing import Any

import pytest
from aiohttp import web
from tests.openapi.examples import built_schema
from tests.openapi.serving import document, imported, serving
from tests.openapi.test_corpus import SHARED, needs_documents

from operations import OperationRegistry, Schema
from operations.openapi import HTTPServiceConfig, from_openapi_file
from operations.openapi.reading.references import References
from operations.openapi.reading.schemas import Direction, SchemaConverter
from operations.openapi.reading.subtypes import Subtypes

PET = {"$ref": "#/components/schemas/Pet"}
BASE: dict[str, Any] = {
    "type": "object",
    "required": ["petType"],
    "properties": {"petType": {"type": "string"}},
    "discriminator": {"propertyName": "petType", "mapping": {"dog": "Dog"}},
}
DOG: dict[str, Any] = {
    "allOf": [PET, {"type": "object", "properties": {"bark": {"type": "string"}}}]
}
CAT: dict[str, Any] = {
    "allOf": [PET, {"type": "object", "properties": {"lives": {"type": "integer"}}}]
}


def build(schema: Any, **schemas: Any) -> Any:
    references = References({"components": {"schemas": schemas}})
    built = built_schema(SchemaConverter(references, ref_siblings=True), schema, Direction.RESPONSE)
    Schema(built).compile()
    return built


def responding(data: Any) -> Any:
    async def respond(request: web.Request) -> web.Response:
        return web.json_response(data)

    return respond


def pets(**schemas: Any) -> dict[str, Any]:
    content = {"application/json": {"schema": {"type": "array", "items": PET}}}
    responses = {"200": {"description": "ok", "content": content}}
    return document(responses=responses, components={"schemas": schemas})


async def test_the_properties_of_a_subtype_arrive() -> None:
    sent = [{"petType": "dog", "bark": "loud"}, {"petType": "cat", "lives": 9}, {"petType": "fish"}]
    async with (
        serving(responding(sent)) as url,
        imported(pets(Pet=BASE, Dog=DOG, Cat=CAT), base_url=url) as registry,
    ):
        assert (await registry.execute("api.call", {})).data == sent


@pytest.mark.requirement("R52")
@pytest.mark.parametrize("kind", ["base", "swagger", "union"])
async def test_a_named_subtype_that_does_not_match_keeps_its_properties(kind: str) -> None:
    mood = {
        "type": "object",
        "properties": {"bark": {"type": "string"}, "mood": {"enum": ["calm"]}},
    }
    plain = {"type": "object", "properties": {"petType": {"type": "string"}}}
    tag = BASE["discriminator"]
    base = {**BASE, "discriminator": "petType"} if kind == "swagger" else BASE
    schemas = (
        {"Pet": base, "Dog": {"allOf": [PET, mood]}, "Cat": CAT}
        if kind != "union"
        else {
            "Pet": {
                "oneOf": [{"$ref": f"#/components/schemas/{name}"} for name in ("Dog", "Cat")],
                "discriminator": tag,
            },
            "Dog": {"allOf": [plain, mood]},
            "Cat": {"allOf": [plain, CAT["allOf"][1]]},
        }
    )
    name = "Dog" if kind == "swagger" else "dog"
    sent = [
        {"petType": name, "bark": "loud", "mood": "new"},
        {"petType": "Cat", "lives": "9", "extra": 1},
        {"petType": name, "bark": "loud", "mood": "calm"},
    ]
    async with (
        serving(responding(sent)) as url,
        imported(pets(**schemas), base_url=url) as registry,
    ):
        envelope = await registry.execute("api.call", {})

    assert envelope.data == [sent[0], {"petType": "Cat", "lives": 9}, sent[2]]
    changes = {(change.kind, change.path) for change in envelope.meta.changes}
    assert changes == {("converted", "/1/lives"), ("stripped", "/1/extra")}


@pytest.mark.requirement("R52")
@pytest.mark.parametrize("kind", ["base", "swagger", "union"])
async def test_a_schema_with_the_discriminator_of_its_base_keeps_properties_of_its_subtypes(
    kind: str,
) -> None:
    dog = {"$ref": "#/components/schemas/Dog"}
    named = {"propertyName": "petType", "mapping": {"dog": "Dog", "pup": "Puppy", "cat": "Cat"}}
    base = {**BASE, "discriminator": "petType" if kind == "swagger" else named}
    if kind == "union":
        base["oneOf"] = [dog, {"$ref": "#/components/schemas/Cat"}]
    puppy = {"properties": {"weeks": {"type": "integer"}, "mood": {"enum": ["calm"]}}}
    described = document(
        responses={
            "200": {
                "description": "ok",
                "content": {"application/json": {"schema": {"type": "array", "items": dog}}},
            }
        },
        components={
            "schemas": {"Pet": base, "Dog": DOG, "Puppy": {"allOf": [dog, puppy]}, "Cat": CAT}
        },
    )
    name = "Puppy" if kind == "swagger" else "pup"
    sent = [
        {"petType": name, "bark": "loud", "weeks": 3},
        {"petType": name, "bark": "loud", "weeks": 3, "mood": "new"},
        {"petType": "dog", "bark": "loud", "lives": 9},
    ]
    async with serving(responding(sent)) as url, imported(described, base_url=url) as registry:
        envelope = await registry.execute("api.call", {})

    assert envelope.data == [*sent[:2], {"petType": "dog", "bark": "loud"}]
    changes = [(change.kind, change.path) for change in envelope.meta.changes]
    assert changes == [("stripped", "/2/lives")]


@pytest.mark.parametrize(
    "variants",
    [
        None,
        5,
        {},
        {"property": 1, "members": {"a": 0}},
        {"property": "t", "members": {"a": 9}},
        {"property": "t", "members": {"a": 0.0}},
    ],
)
def test_a_malformed_annotation_of_variants_is_ignored(variants: Any) -> None:
    schema = {"anyOf": [{"properties": {"t": {"type": "string"}}}, {"type": "object"}]}
    assert Schema({**schema, "x-variants": variants}).cast({"t": "a", "b": 1}).value == {"t": "a"}


@pytest.mark.requirement("R52")
@pytest.mark.parametrize(
    ("value", "changed"),
    [
        ({"t": "dog", "bark": 5}, {"mismatch"}),
        ({"t": "dog", "bark": 5, "lives": 9}, {"mismatch"}),
        ({"t": "dog", "lives": 9}, set[str]()),
        ({"t": "cat", "bark": "loud", "owner": {"name": "Ann"}}, set[str]()),
        ({"t": "dog", "bark": 5, "owner": {"name": "Ann", "lives": 9}}, {"mismatch"}),
    ],
)
def test_closed_members_do_not_strip_what_the_named_or_the_matching_member_declares(
    value: Any, changed: set[str]
) -> None:
    def member(**properties: Any) -> Any:
        known = {"t": {"type": "string"}, **properties}
        return {"type": "object", "properties": known, "additionalProperties": False}

    owner = {"owner": member(name={"type": "string"})}
    schema = {
        "anyOf": [
            member(bark={"enum": ["loud"]}, owner=member(name={}, lives={})),
            member(lives={"type": "integer"}, **owner),
        ],
        "x-variants": {"property": "t", "members": {"dog": 0, "cat": 1}},
    }
    result = Schema(schema).cast(value)
    assert result.value == value
    assert {change.kind for change in result.changes} == changed


def test_a_base_is_a_union_of_its_subtypes_and_its_own_part() -> None:
    built = build({"type": "array", "items": PET}, Pet=BASE, Dog=DOG, Cat=CAT)

    members = [{"$ref": f"#/$defs/{name}"} for name in ("Dog", "Cat", "Pet.base")]
    assert built["$defs"]["Pet"]["anyOf"] == members
    assert built["$defs"]["Dog"]["allOf"][0] == {"$ref": "#/$defs/Pet.base"}
    assert built["$defs"]["Pet.base"]["required"] == ["petType"]
    assert Schema(built).check([{"petType": "lizard"}])
    assert not Schema(built).check([{"bark": "loud"}])


def test_swagger_discriminators_have_subtypes_too() -> None:
    ref = {"$ref": "#/definitions/Pet"}
    definitions = {
        "Pet": {**BASE, "discriminator": "petType"},
        "Dog": {"allOf": [ref, {"properties": {"bark": {"type": "string"}}}]},
    }
    converter = SchemaConverter(References({"definitions": definitions}), ref_siblings=False)
    built: Any = built_schema(converter, ref, Direction.RESPONSE)
    assert built["$defs"].keys() == {"Pet", "Pet.base", "Dog"}


def test_subtypes_of_subtypes_belong_to_the_union_of_each_base() -> None:
    puppy = {"allOf": [{"$ref": "#/components/schemas/Dog"}, {"properties": {"weeks": {}}}]}
    plain = build(PET, Pet=BASE, Dog=DOG, Puppy=puppy)["$defs"]
    assert plain["Pet"]["anyOf"] == [
        {"$ref": f"#/$defs/{name}"} for name in ("Dog.base", "Puppy", "Pet.base")
    ]
    assert plain["Dog.base"]["allOf"][0] == {"$ref": "#/$defs/Pet.base"}
    assert plain["Puppy"]["allOf"][0] == {"$ref": "#/$defs/Dog.base"}

    dog = {"allOf": [PET, {"properties": {"bark": {}}, "discriminator": {"propertyName": "age"}}]}
    nested = build(PET, Pet=BASE, Dog=dog, Puppy=puppy)["$defs"]
    assert nested["Pet"]["anyOf"] == [{"$ref": "#/$defs/Dog"}, {"$ref": "#/$defs/Pet.base"}]
    assert nested["Dog"]["anyOf"] == [{"$ref": "#/$defs/Puppy"}, {"$ref": "#/$defs/Dog.base"}]
    assert nested["Dog.base"]["allOf"][0] == {"$ref": "#/$defs/Pet.base"}
    assert nested["Puppy"]["allOf"][0] == {"$ref": "#/$defs/Dog.base"}


def test_a_use_of_a_base_inside_a_subtype_is_the_union() -> None:
    friend = {"allOf": [PET], "description": "Any pet."}
    dog = {"allOf": [PET, {"properties": {"friend": friend, "owner": PET}}]}
    built = build(PET, Pet=BASE, Dog=dog)["$defs"]["Dog"]["allOf"][1]["properties"]
    assert built["friend"]["allOf"] == [{"$ref": "#/$defs/Pet"}]
    assert built["owner"] == {"$ref": "#/$defs/Pet"}


def test_a_second_name_for_a_base_is_the_union() -> None:
    built = build(
        {"$ref": "#/components/schemas/Animal"},
        Pet=BASE,
        Dog=DOG,
        Animal={"allOf": [PET], "description": "A pet."},
    )
    assert built["$defs"]["Animal"]["allOf"] == [{"$ref": "#/$defs/Pet"}]


def test_a_union_whose_members_extend_it_is_not_a_circle() -> None:
    listed = [{"$ref": "#/components/schemas/Dog"}, {"$ref": "#/components/schemas/Cat"}]
    built = build(PET, Pet={**BASE, "oneOf": listed}, Dog=DOG, Cat=CAT)
    assert built["$defs"]["Dog"]["allOf"][0] == {"$ref": "#/$defs/Pet.base"}
    assert "anyOf" not in built["$defs"]["Pet.base"]
    assert Schema(built).check({"petType": "dog", "bark": "loud"})
    assert not Schema(built).check({"bark": "loud"})


def test_names_that_the_document_uses_itself_stay_its_own() -> None:
    schemas = {"Pet": BASE, "Dog": DOG, "Pet.base": {"type": "integer"}}
    refs = [PET, {"$ref": "#/components/schemas/Pet.base"}]
    built = build({"type": "array", "prefixItems": refs}, **schemas)
    assert built["$defs"]["Pet.base"] == {"type": "integer"}
    assert Schema(built).check([{"petType": "dog"}, 1])


def test_a_base_with_very_many_subtypes_allows_any_property() -> None:
    many = {f"Dog{number}": DOG for number in range(100)}
    built = build(PET, Pet={**BASE, "discriminator": {"propertyName": "petType"}}, **many)
    assert built["$defs"].keys() == {"Pet", "Pet.base"}
    sent = {"petType": "dog", "bark": "loud"}
    assert Schema(built).cast(sent).value == sent


class CountingReferences(References):
    """References that count how often a reference is looked up."""

    lookups = 0

    def located(self, ref: str) -> tuple[str, Any] | None:
        self.lookups += 1
        return super().located(ref)


def test_the_names_of_a_base_are_read_once_for_all_of_its_subtypes() -> None:
    def lookups(number: int) -> int:
        names = [f"Dog{each}" for each in range(number)]
        mapping = {name.lower(): f"#/components/schemas/{name}" for name in names}
        base = {**BASE, "discriminator": {"propertyName": "petType", "mapping": mapping}}
        schemas = {"Pet": base, **dict.fromkeys(names, DOG)}
        references = CountingReferences({"components": {"schemas": schemas}})
        assert len(Subtypes(references).of("/components/schemas/Pet")) == number
        return references.lookups

    assert lookups(200) < 2.5 * lookups(100)


@needs_documents
async def test_the_subtypes_of_a_real_document_arrive_whole() -> None:
    name = "adyen__CapitalService-v1.yaml"
    amount = {"currency": "EUR", "value": 1}
    disbursement: dict[str, Any] = {
        "accountHolderId": "AH1",
        "amount": amount,
        "balanceAccountId": "BA1",
        "balances": {"currency": "EUR", "fee": 1, "principal": 1, "total": 2},
        "fee": {"amount": amount},
        "grantId": "GR1",
        "id": "DI1",
        "repayment": {"basisPoints": 1, "updateDescription": "new"},
    }
    accounts = [
        {"type": "ukLocal", "accountNumber": "12345678", "sortCode": "123456"},
        {"type": "iban", "iban": "NL13TEST0123456789"},
    ]
    disbursement["fundsCollections"] = [{"accountIdentification": account} for account in accounts]
    sent = {"disbursements": [disbursement]}

    async def respond(request: web.Request) -> web.Response:
        return web.json_response(sent)

    async with serving(respond) as url, OperationRegistry() as registry:
        config = HTTPServiceConfig(namespace="api", base_url=url)
        registry.register_all(await from_openapi_file(SHARED / "openapi" / name, config))
        envelope = await registry.execute(
            "api.get-grants-grantId-disbursements", {"grantId": "GR1"}
        )
    assert envelope.data == sent
