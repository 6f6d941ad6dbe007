"""Programs from npm, installed on demand beside the `package.json` of the tests that use them."""

import fcntl
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.limits import scaled
from tests.servers import installer_environment


def install_node_packages(folder: Path, program: str) -> None:
    """Install the packages of `folder` once; skip the test where that is not possible.

    Args:
        folder: The folder of `package.json`; several test processes may install it at the same time.
        program: A file below `node_modules` that exists after the installation.
    """
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("there is no Node here")
    with (folder / ".install.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "node_modules" / program).exists():
            options = ["--no-audit", "--no-fund", "--no-package-lock", "--ignore-scripts"]
            done = subprocess.run(
                ["npm", "install", *options],
                cwd=folder,
                env=installer_environment(),
                capture_output=True,
                text=True,
                timeout=scaled(200),
                check=False,
            )
            if done.returncode != 0:
                pytest.skip(f"npm cannot install the packages: {done.stderr[-300:]}")
