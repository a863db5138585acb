"""Where Node is, and the harness of `tests/node/harness`: the unmodified JavaScript SDK on an in-process channel."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

HARNESS = Path(__file__).parents[1] / "node" / "harness"
TRACES = Path(__file__).parents[1] / "fixtures" / "wire"


def node(program: str, *arguments: str) -> list[str]:
    """The command that runs a program of the harness.

    Raises:
        RuntimeError: Node or the npm packages are missing.
    """
    search = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    found = shutil.which("node", path=search)
    if found is None or not (HARNESS.parent / "node_modules" / "@ably" / "ai-transport").is_dir():
        raise RuntimeError("Node or the npm packages of tests/node are not installed: make install")
    return [found, str(HARNESS / program), *arguments]
