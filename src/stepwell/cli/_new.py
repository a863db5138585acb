"""`stepwell new`: a project to begin with."""

from __future__ import annotations

import keyword
import re
import sys
from collections.abc import Iterator
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from ._options import Json
from ._terminal import CommandError, Terminal, UsageError

__all__ = ["new"]

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9]*(?:[-_][A-Za-z0-9]+)*")


def new(
    path: Annotated[Path, Parameter(name="NAME", help="The project's name, or a path that ends with it.")],
    /,
    *,
    json: Json = False,
) -> None:
    """Create a project with a two-stage flow that passes its own tests.

    The directory must be empty or not there yet.
    """
    name = path.resolve().name
    package = name.replace("-", "_").lower()
    if not _NAME.fullmatch(name):
        raise UsageError(f"{name!r} cannot name a project: use letters, digits, - and _, and begin with a letter.")
    if keyword.iskeyword(package) or package in sys.stdlib_module_names or package in ("stepwell", "tests", "pytest"):
        raise UsageError(f"{name!r} would hide a module or word of Python's: choose another name.")
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise CommandError(f"{path} exists and is not an empty directory: choose another name, or remove it.")
    words = {
        "__NAME__": name,
        "__PACKAGE__": package,
        "__CLASS__": "".join(part[:1].upper() + part[1:] for part in re.split("[-_]", name)) + "Flow",
    }
    made: list[str] = []
    try:
        for place, content in _templates(files("stepwell.cli") / "_templates"):
            target = path / _filled(place, words)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(_filled(content, words), encoding="utf-8")
            made.append(str(target.relative_to(path)))
    except OSError as error:
        raise CommandError(f"{path} cannot be written: {error.strerror}.") from None
    terminal = Terminal()
    if json:
        terminal.json({"path": str(path), "package": package, "flow": words["__CLASS__"], "files": made})
        return
    terminal.line(f"Created {path} with {len(made)} files:", "green")
    for one in made:
        terminal.line(f"  {one}")
    terminal.line("Next:", "bold")
    for command in (f"cd {path}", "pip install -e '.[dev]'", "pytest", f"stepwell chat {package}"):
        terminal.line(f"  {command}")


def _templates(directory: Traversable, place: str = "") -> Iterator[tuple[str, str]]:
    """The files of a new project: where they go, and their text."""
    for entry in sorted(directory.iterdir(), key=lambda one: one.name):
        name = f".{entry.name}" if entry.name == "gitignore.tmpl" else entry.name
        if entry.is_dir():
            yield from _templates(entry, f"{place}{name}/")
        elif name.endswith(".tmpl"):
            yield place + name.removesuffix(".tmpl"), entry.read_text(encoding="utf-8")


def _filled(text: str, words: dict[str, str]) -> str:
    for word, value in words.items():
        text = text.replace(word, value)
    return text
