"""The same id of two issuers names two callers."""

from typing import Any

import msgspec
import pytest
from tests.authority.test_approvals import DENIED, Office
from tests.authority.test_grants import KEY

from operations import ErrorCode, Identity, OperationContext, OperationRegistry
from operations.authority import Grants
from operations.authority.grants import GrantError, Subject, mint, new_block, read_token
from operations.base.errors import CallError
from operations.calls import PendingRequestMap, serve_calls
from operations.calls.protocol.events import CallRequested, RequestPayload, encode_event, read_event
from operations.contract.wire import CALL_EVENT_SCHEMAS
from operations.pubsub.memory import MemoryTarget
from operations.recorder.graph import CallGraph
from operations.sources.credentials import CallerToken

SCOPES = ["task", "approvals:answer"]
OWN = Identity("ann", SCOPES)
ONE = Identity("ann", SCOPES, issuer="https://one.example")
TWO = Identity("ann", SCOPES, issuer="https://two.example")
ALL = [OWN, ONE, TWO]

pytestmark = pytest.mark.requirement("R63")


def test_every_issuer_has_its_own_keys() -> None:
    odd = [
        Identity("ann\\@https://one.example"),
        Identity("ann@https://one.example"),
        Identity("ann", issuer="https://one.example\nx"),
        Identity("ann", issuer="https://one.example", acting=("x",)),
        Identity("ann", acting=("https://one.example",)),
        Identity("ann\\", issuer="@https://one.example"),
    ]
    identities = [*ALL, *odd]

    assert len({each.key for each in identities}) == len(identities)
    assert len({each.limit_key for each in identities}) == len(identities)
    assert len(set(ALL)) == 3
    assert [each.account for each in ALL] == [
        "ann",
        "ann@https://one.example",
        "ann@https://two.example",
    ]


async def test_a_grant_has_the_issuer_of_its_subject() -> None:
    people = {"ann": OWN}
    grants = Grants(KEY, subjects=people.get)
    resolved = [await grants.resolve(grants.create(each, "bot", operations=["*"])) for each in ALL]
    named = await grants.resolve(grants.create("ann", "bot", operations=["*"]))

    assert [each and each.issuer for each in (*resolved, named)] == [
        None,
        ONE.issuer,
        TWO.issuer,
        None,
    ]
    # A worker behind a hub receives it as well.
    token = grants.delegate("workers")("task.add", OperationContext(identity=ONE))
    there = await Grants(grants.for_name("workers")).resolve(str(token))
    assert there is not None
    assert (there.id, there.issuer) == (ONE.id, ONE.issuer)


async def test_an_id_in_a_token_of_an_issuer_is_not_looked_up_among_the_callers_of_this_server() -> (
    None
):
    grants = Grants(KEY, subjects={"ann": OWN}.get)
    token = mint(KEY, Subject(id="ann", issuer="https://one.example"), new_block("bot"))

    with pytest.raises(GrantError, match="not known"):
        await grants.resolve(token)


async def test_approvals_belong_to_one_issuer() -> None:
    office = Office()
    assert await office.call(who=ONE) == ErrorCode.APPROVAL_REQUIRED
    assert await office.answer(ONE) == DENIED
    assert await office.answer() == "approved"

    # The approval of one is not used by another, nor does it end with the other's call.
    assert await office.call(who=OWN) == ErrorCode.APPROVAL_REQUIRED
    assert await office.call(who=TWO) == ErrorCode.APPROVAL_REQUIRED
    assert await office.call(who=ONE) == "deleted"


def test_a_token_of_another_service_belongs_to_one_issuer() -> None:
    token = CallerToken(users={"ann": "own", "ann@https://one.example": "one"})

    def of(identity: Identity) -> str:
        return str(token.load()(OperationContext(identity=identity)))

    assert (of(OWN), of(ONE)) == ("own", "one")
    with pytest.raises(CallError):
        of(TWO)


async def test_the_issuer_is_recorded_and_travels_to_workers() -> None:
    registry, graph, target = OperationRegistry(), CallGraph(), MemoryTarget()
    registry.record(graph)

    @registry.operation("task.who")
    async def who(context: OperationContext) -> Any:
        return context.identity and context.identity.issuer

    async with serve_calls(registry, target), PendingRequestMap(target) as calls:
        found = await calls.call("task.who", {}, identity=ONE)

    assert found.data == ONE.issuer
    (record,) = graph
    assert (record.identity_id, record.issuer) == ("ann", ONE.issuer)
    body = encode_event(
        CallRequested(payload=RequestPayload(request_id="r", operation_id="a.b", identity=ONE))
    )
    assert CALL_EVENT_SCHEMAS["call.requested"].check(msgspec.json.decode(body))
    event = read_event(body)
    assert isinstance(event, CallRequested)
    assert event.payload.identity == ONE


def test_a_subject_without_an_issuer_is_written_as_before() -> None:
    token = Grants(KEY).create(OWN, "bot", operations=["*"])

    assert "issuer" not in msgspec.to_builtins(read_token(token)[0])
