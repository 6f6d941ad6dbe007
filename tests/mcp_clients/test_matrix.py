"""One row of the client matrix (`scripts/matrix` runs all): the clients that most programs use today."""

import shutil

import pytest
from tests.mcp_clients.matrix import EXPECTED, MatrixError, judge, prepare, serving

pytestmark = pytest.mark.slow


@pytest.mark.requirement("R52")
def test_the_typescript_sdk_sees_everything() -> None:
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("Node is not installed")
    try:
        prepare("typescript-1")
    except MatrixError as error:
        pytest.skip(f"npm cannot install the SDK here: {error}")

    with serving() as url:
        cells = judge("typescript-1", url)

    assert cells == dict.fromkeys(EXPECTED, "")
