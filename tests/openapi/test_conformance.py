"""Every request matches its document: the conformance table, over real HTTP."""

import pytest
from tests.openapi.conformance import CASES, STYLES, Case, arguments
from tests.openapi.echo import Echo

from operations import OperationRegistry
from operations.openapi import HTTPServiceConfig, from_openapi


@pytest.mark.parametrize("case", CASES, ids=lambda case: str(case.id))
async def test_a_call_arrives_as_the_document_describes(case: Case, echo: Echo) -> None:
    config = HTTPServiceConfig(
        namespace="api", credentials=case.credentials, allowed_hosts=(echo.url,)
    )
    async with OperationRegistry() as registry:
        registry.register_all(from_openapi(case.whole(echo.url), config))
        echo.seen.clear()

        envelope = await registry.execute("api.call", arguments(case))

    assert envelope.meta.status_code == 200  # type: ignore[union-attr]
    (seen,) = echo.seen
    case.check(seen, True)


@pytest.mark.skipif(not STYLES.exists(), reason="the shared table of styles is not here")
def test_every_cell_of_the_style_table_is_in_the_table() -> None:
    styles = [case for case in CASES if case.group == "styles"]
    assert len([case for case in styles if "undefined" not in case.id]) == 41
