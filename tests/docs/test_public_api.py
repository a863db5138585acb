"""What is public: the names of every public module are written down, so that a change of them is deliberate."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import stepwell
from stepwell import errors

SNAPSHOT = Path(__file__).parent / "public_api.json"
ROOT = Path(__file__).parents[2]
NOT_PUBLIC = ("stepwell.cli",)
"""The command's own package: its interface is the command line."""


def public_modules() -> dict[str, ModuleType]:
    """Modules without an underscore anywhere in their names."""
    found = {"stepwell": stepwell}
    for info in pkgutil.walk_packages(stepwell.__path__, "stepwell."):
        if any(part.startswith("_") for part in info.name.split(".")) or info.name.startswith(NOT_PUBLIC):
            continue
        found[info.name] = importlib.import_module(info.name)
    return found


MODULES = public_modules()


def names() -> dict[str, list[str]]:
    return {name: sorted(module.__all__) for name, module in sorted(MODULES.items())}


def test_the_public_names_are_those_written_down() -> None:
    """After a deliberate change: `python tests/docs/test_public_api.py` writes the file anew."""
    assert names() == json.loads(SNAPSHOT.read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", MODULES)
def test_every_public_name_is_there_once(name: str) -> None:
    module = MODULES[name]
    assert len(set(module.__all__)) == len(module.__all__)
    for one in module.__all__:
        assert hasattr(module, one), one


def test_everyday_names_are_the_same_objects_as_in_their_packages() -> None:
    packages = [MODULES[name] for name in MODULES if name != "stepwell"]
    for name in stepwell.__all__:
        value = getattr(stepwell, name)
        assert any(name in package.__all__ and getattr(package, name) is value for package in packages), name


def test_the_reference_lists_the_everyday_names_and_has_a_page_for_each_module() -> None:
    page = (ROOT / "docs/reference/stepwell.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"`(\w+)`(?=[,| ])", page.partition("| --- | --- |")[2])) == sorted(stepwell.__all__)
    documented = {
        match[1]
        for file in (ROOT / "docs/reference").glob("*.md")
        if (match := re.search(r"^::: (\S+)", file.read_text(encoding="utf-8"), re.M))
    }
    assert documented >= {
        f"stepwell.{name}"
        for name in ("flow", "engine", "loop", "models", "messages", "outcomes", "tools", "sessions", "errors",
                     "server", "testing")
    }  # fmt: skip


# -- docstrings


def documented_objects() -> Iterator[tuple[str, Any]]:
    """Public modules, classes and functions, and the public methods and properties of those classes."""
    seen: set[int] = set()
    for name, module in MODULES.items():
        yield name, module
        for one in module.__all__:
            value = getattr(module, one)
            if not (inspect.isclass(value) or inspect.isfunction(value)) or id(value) in seen:
                continue
            if not getattr(value, "__module__", "").startswith("stepwell"):
                continue
            seen.add(id(value))
            yield f"{name}.{one}", value
            if inspect.isclass(value):
                yield from _members(f"{name}.{one}", value)


def _members(where: str, cls: type[Any]) -> Iterator[tuple[str, Any]]:
    for attribute, value in vars(cls).items():
        if attribute.startswith("_"):
            continue
        plain = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
        # A test of a public suite is described by its name.
        if (inspect.isfunction(plain) or isinstance(plain, property)) and not attribute.startswith("test_"):
            yield f"{where}.{attribute}", plain


def test_every_public_object_has_a_docstring() -> None:
    missing = [where for where, value in documented_objects() if not _docstring(value)]
    assert not missing


def _docstring(value: Any) -> str | None:
    text = value.__doc__ if not isinstance(value, property) else (value.fget.__doc__ if value.fget else None)
    if dataclasses.is_dataclass(value) and text and re.match(rf"{value.__name__}\(", text):
        return None  # the signature that dataclasses write where there is nothing
    return text


# -- errors


def test_the_tree_in_the_docstring_is_the_tree_of_the_classes() -> None:
    drawn = re.search(r"```text\n(.*?)```", str(errors.__doc__), re.S)
    assert drawn
    parents: dict[str, str | None] = {}
    path: list[str] = []
    for line in drawn[1].splitlines():
        match = re.match(r"^([│├└─ ]*)(\w+)", line)
        assert match, line
        depth = len(match[1]) // 4
        del path[depth:]
        parents[match[2]] = path[-1] if path else None
        path.append(match[2])
    real = {
        name: None if cls is errors.StepwellError else cls.__base__.__name__
        for name in errors.__all__
        if inspect.isclass(cls := getattr(errors, name))
    }
    assert parents == real


def test_codes_of_errors_are_stable_and_unique() -> None:
    classes = [cls for name in errors.__all__ if inspect.isclass(cls := getattr(errors, name))]
    codes = [cls.code for cls in classes]
    assert len(set(codes)) == len(codes)
    assert all(re.fullmatch(r"[a-z]+(_[a-z]+)*", code) for code in codes)


if __name__ == "__main__":
    SNAPSHOT.write_text(json.dumps(names(), indent=2) + "\n", encoding="utf-8")
