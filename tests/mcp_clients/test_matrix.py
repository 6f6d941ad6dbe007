"""Two rows of the client matrix (`scripts/matrix` runs all): the clients that most programs use today."""

import shutil

import pytest
from tests.mcp_clients.matrix import EXPECTED, MatrixError, judge, prepare, serving

pytestmark = pytest.mark.slow


@pytest.mark.requirement("R52")
@pytest.mark.parametrize("name", ["typescript-1", "fastmcp-4"])
def test_a_client_sees_types_mismatches_and_everything_else(name: str) -> None:
    if name.startswith("typescript") and None in (shutil.which("node"), shutil.which("npm")):
        pytest.skip("Node is not installed")
    try:
        prepare(name)
    except MatrixError as error:
        pytest.skip(f"the client cannot be installed here: {error}")

    with serving() as url:
        cells = judge(name, url)

    assert cells == dict.fromkeys(EXPECTED, "")
