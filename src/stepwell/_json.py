"""Plain JSON: checking, copying, reading by path. One place, because state, outcomes and inputs share the rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from .errors import NonJsonValueError

__all__ = ["check_text", "deep_merge", "is_text_clean", "json_copy", "read_path", "split_path"]

MAX_DEPTH = 500
"""Deeper values are refused: other readers of the stored JSON give up far earlier than Python's own limit."""


def is_text_clean(text: str) -> bool:
    """Whether `text` is valid Unicode: a lone surrogate cannot be stored as UTF-8."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_text(text: str, path: str) -> str:
    """Return `text`.

    Raises:
        NonJsonValueError: It holds a lone surrogate.
    """
    if not is_text_clean(text):
        raise NonJsonValueError(f"The text at {path or 'the top'} holds a lone surrogate: send valid Unicode.", path)
    return text


def json_copy(value: Any, path: str = "", depth: int = 0) -> Any:
    """Copy a JSON value deeply, tuples becoming lists.

    Raises:
        NonJsonValueError: Something in it is not JSON; `path` says where. NaN and infinities are not JSON.
    """
    kind = type(value)  # pyright: ignore[reportUnknownVariableType]
    if kind is str:
        return value if value.isascii() else check_text(value, path)
    if value is None or kind is bool or kind is int:
        return value
    if kind is float:
        if value - value != 0:
            raise NonJsonValueError(f"The number at {path or 'the top'} is not finite: JSON has no such number.", path)
        return value
    if depth >= MAX_DEPTH:
        raise NonJsonValueError(f"The value at {path} is nested deeper than {MAX_DEPTH} levels.", path)
    if isinstance(value, Mapping):
        result: dict[str, Any] = {}
        for key, item in cast("Mapping[Any, Any]", value).items():
            where = f"{path}.{key}" if path else str(key)
            if not isinstance(key, str):
                raise NonJsonValueError(f"The key {where} is not text: JSON objects have text keys.", where)
            result[check_text(key, where)] = json_copy(item, where, depth + 1)
        return result
    if isinstance(value, (list, tuple)):
        items: list[Any] = []
        # A loop, one frame a level: a comprehension has its own, and the deepest value would be too deep for Python.
        for index, item in enumerate(cast("Sequence[Any]", value)):
            items.append(json_copy(item, f"{path}[{index}]", depth + 1))
        return items
    if isinstance(value, (str, int, float)):  # subclasses such as enums: stored as the plain value
        return json_copy(_plain(value), path, depth)
    raise NonJsonValueError(
        f"The value at {path or 'the top'} is a {kind.__name__}, which is not JSON: convert it first "
        "(text, number, true/false, null, list or object).",
        path,
    )


def _plain(value: str | int | float) -> str | int | float:
    if isinstance(value, str):
        return str.__str__(value)
    return int(value) if isinstance(value, int) else float(value)


def deep_merge(into: dict[str, Any], patch: Mapping[str, Any]) -> None:
    """Merge `patch` into `into`: objects are merged key by key, everything else is replaced."""
    for key, value in patch.items():
        current = into.get(key)
        if isinstance(current, dict) and isinstance(value, Mapping):
            deep_merge(cast("dict[str, Any]", current), cast("Mapping[str, Any]", value))
        else:
            into[key] = value


def split_path(path: str | Sequence[str | int]) -> Sequence[str | int]:
    """Keys of a path: dotted text, or the keys themselves."""
    return path.split(".") if isinstance(path, str) else path


def read_path(value: Any, path: str | Sequence[str | int], default: Any = None) -> Any:
    """Read by path; `default` where a key is missing. List items are read by number."""
    for key in split_path(path):
        if isinstance(value, Mapping) and key in value:
            value = cast("Mapping[Any, Any]", value)[key]
        elif isinstance(value, list) and str(key).isdecimal() and int(key) < len(cast("list[Any]", value)):
            value = cast("list[Any]", value)[int(key)]
        else:
            return default
    return value
