"""Response examples of real documents reach the caller; `scripts/examples` sends those of all documents."""

import pytest
from tests.openapi.examples import examine
from tests.openapi.test_corpus import SHARED, needs_documents

NAMES = (
    "adyen__BinLookupService-v54.json", "guru-api.video__1.yaml", "adyen__TransferService-v4.json",
    "hubspot__CMS-urlRedirects.json", "oai__2.0-api-with-examples.yaml", "redocly__museum.yaml",
    "readme__3.1-train-travel.yaml", "sendgrid__tsg-suppressions-v3.yaml",
    "twilio__twilio-lookups-v2.yaml", "xero__projects.yaml",
)  # fmt: skip


@needs_documents
@pytest.mark.parametrize("name", NAMES)
async def test_every_example_arrives_and_every_change_is_listed(name: str) -> None:
    report = await examine(SHARED / "openapi" / name)
    assert report.failures == []
    assert report.counts["examples"] > 0
