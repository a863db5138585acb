"""From what a person types to flow classes and providers."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from stepwell.flow import Flow
from stepwell.models import ModelGateway
from stepwell.models.providers import Providers

from ._terminal import CommandError, UsageError

__all__ = ["load_agents", "load_flow", "load_flows", "load_providers"]


def load_flows(targets: Sequence[str]) -> list[type[Flow]]:
    """Import the flows of all targets, each once.

    Raises:
        UsageError: A target names nothing.
        CommandError: Its code cannot be imported.
    """
    found: dict[type[Flow], None] = {}
    for target in targets:
        found.update(dict.fromkeys(_flows(target)))
    return list(found)


def load_flow(target: str) -> type[Flow]:
    """Import the one flow of a target.

    Raises:
        UsageError: It names nothing, or several.
        CommandError: Its code cannot be imported.
    """
    found = _flows(target)
    if len(found) > 1:
        names = " or ".join(f"{target}:{cls.__name__}" for cls in found)
        raise UsageError(f"{target} has {len(found)} flows: say which one, {names}.")
    return found[0]


def load_agents(given: Sequence[str]) -> dict[str, Callable[..., Any]]:
    """Import agents, each `target:function` or `NAME=target:function`, by name; without one it is the function's.

    Raises:
        UsageError: A target is no async function, or two have the same name.
        CommandError: Its code cannot be imported.
    """
    found: dict[str, Callable[..., Any]] = {}
    for one in given:
        name, _, target = one.rpartition("=")
        agent = _attribute(target)
        if not inspect.iscoroutinefunction(agent):
            raise UsageError(f"{target} is no async function: an agent is one, and gets its run.")
        name = name or target.rpartition(":")[2]
        if name in found:
            raise UsageError(f"Two agents are named {name}: write --agent NAME={target}.")
        found[name] = agent
    return found


def load_providers(models: str) -> Providers:
    """The providers that `--models` names.

    Raises:
        UsageError: It names nothing.
        CommandError: Its code cannot be imported.
        LlmSetupError: The environment is wrong.
    """
    from stepwell.models.offline import OfflineModel

    if models == "env":
        providers = Providers.from_env()
    elif models == "offline":
        providers = Providers()
    else:
        value = _attribute(models)
        if isinstance(value, Mapping):
            value = Providers(cast("Mapping[str, ModelGateway]", value))
        if not isinstance(value, Providers):
            raise UsageError(f"{models} is no Providers object: --models takes env, offline or module:attribute.")
        providers = value
    if OfflineModel.name not in providers:
        providers.register(OfflineModel.name, OfflineModel())
    return providers


def _attribute(target: str) -> Any:
    name, separator, attribute = target.rpartition(":")
    if not separator:
        raise UsageError(f"{target!r} has no attribute: write module:attribute.")
    module = _module(name)
    try:
        return getattr(module, attribute)
    except AttributeError:
        raise UsageError(f"{name} has no {attribute}.") from None


def _flows(target: str) -> list[type[Flow]]:
    place, separator, name = target.rpartition(":")
    if not separator:
        place, name = target, ""
    if not place:
        raise UsageError(f"{target!r} is no target: write module:Flow, path/to/file.py:Flow or a package's directory.")
    module = _module(place)
    found = _in_module(module)
    if not name:
        if not found:
            raise UsageError(f"{place} has no flow: define a class derived from stepwell.Flow, or name its module.")
        return found
    value: Any = getattr(module, name, None)
    if not (isinstance(value, type) and issubclass(value, Flow)):
        known = ", ".join(cls.__name__ for cls in found)
        what = "is no flow" if value is not None else "is not there"
        raise UsageError(f"{name} {what} in {place} ({f'flows: {known}' if known else 'which has no flow'}).")
    return [value]


def _in_module(module: ModuleType) -> list[type[Flow]]:
    """The flows that a module makes public, or else defines."""
    public: Sequence[str] | None = getattr(module, "__all__", None)
    names = list(vars(module)) if public is None else list(public)
    classes = [value for name in names if isinstance(value := getattr(module, name, None), type)]
    flows = [cls for cls in classes if issubclass(cls, Flow) and cls is not Flow and not inspect.isabstract(cls)]
    if public is None:
        flows = [cls for cls in flows if cls.__module__.partition(".")[0] == module.__name__.partition(".")[0]]
    return list(dict.fromkeys(flows))


def _module(place: str) -> ModuleType:
    """Import a module by dotted name, file or directory."""
    path = Path(place)
    if place.endswith(".py"):
        if not path.is_file():
            raise UsageError(f"There is no file {place}.")
        return _of_file(path.resolve(), place)
    if path.is_dir():
        return _of_directory(path.resolve(), place)
    _prefer(Path.cwd())
    first = place.partition(".")[0]
    if not first or importlib.util.find_spec(first) is None:
        raise UsageError(
            f"There is no module {place} here: run the command in the project's directory, or give a path that ends "
            "in .py or is a directory."
        )
    return _import(place, place)


def _importable(directory: Path) -> bool:
    return (directory / "__init__.py").is_file()


def _of_directory(path: Path, place: str) -> ModuleType:
    if _importable(path):
        return _of_file(path / "__init__.py", place)
    inside = [one for root in (path, path / "src") if root.is_dir() for one in sorted(root.iterdir())]
    packages = [one for one in inside if _importable(one) and one.name != "tests"]
    if len(packages) != 1:
        names = " or ".join(str(Path(place) / one.relative_to(path)) for one in packages)
        raise UsageError(f"{place} is no package: give {names or 'a directory with an __init__.py'}.")
    return _of_file(packages[0] / "__init__.py", place)


def _of_file(path: Path, place: str) -> ModuleType:
    """Import a file under the name it has in its package, so that its relative imports work."""
    root, parts = path.parent, [] if path.name == "__init__.py" else [path.stem]
    while _importable(root):
        parts.insert(0, root.name)
        root = root.parent
    _prefer(root)
    module = _import(".".join(parts), place)
    loaded = getattr(module, "__file__", None)
    if loaded is None or Path(loaded).resolve() != path:
        raise UsageError(
            f"{place} cannot be imported: another module is named {module.__name__}. Rename the file or its package."
        )
    return module


def _prefer(root: Path) -> None:
    text = str(root)
    if text not in sys.path:
        sys.path.insert(0, text)
        importlib.invalidate_caches()


def _import(name: str, place: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise CommandError(f"{place} cannot be imported: {_why(error)}") from error


def _why(error: BaseException) -> str:
    """What an import raised, and where in the author's code."""
    if isinstance(error, SyntaxError):
        return f"SyntaxError: {error.msg} ({Path(error.filename or '?').name}, line {error.lineno})."
    frames = [
        f for f in traceback.extract_tb(error.__traceback__) if "importlib" not in f.filename and f.name != "_import"
    ]
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    text = str(error).strip().partition("\n")[0].removesuffix(".")
    return f"{type(error).__name__}: {text}{where}."
