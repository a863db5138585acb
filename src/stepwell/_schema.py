"""A shape given as a pydantic model class or as a JSON schema: its JSON schema, and values checked against it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, cast

from ._json import json_copy
from .messages import JsonObject

__all__ = ["MAX_LINES", "Schema", "problems"]

MAX_LINES = 20
"""Problems that a model is told at once."""


class Schema:
    """Built once per class; pydantic and jsonschema are imported only where they are needed.

    Args:
        spec: A pydantic model class, or a JSON schema.

    Raises:
        ValueError: It is neither, or the schema is not valid; the text says why.
    """

    __slots__ = ("_model", "_validator", "json")

    def __init__(self, spec: type[Any] | Mapping[str, Any]) -> None:
        self._model: Any = None
        self._validator: Any = None
        if isinstance(spec, Mapping):
            self.json = cast("JsonObject", json_copy(spec))
            self._validator = _validator(self.json)
        elif hasattr(spec, "model_json_schema"):
            self._model = spec
            self.json = cast("JsonObject", self._model.model_json_schema())
        else:
            raise ValueError("it is neither a pydantic model class nor a JSON schema")

    def parse(self, value: Any) -> Any:
        """The value, as an object of the model class where there is one.

        Raises:
            ValueError: It does not match; the text has one line per field, for the model.
        """
        if self._model is not None:
            import pydantic

            try:
                return self._model.model_validate(value)
            except pydantic.ValidationError as error:
                raise ValueError(problems(error, "object")) from None
        found = sorted(self._validator.iter_errors(value), key=str)
        if found:
            raise ValueError("\n".join(f"{p.json_path}: {p.message}" for p in found[:MAX_LINES]))
        return value


def problems(error: Any, whole: str) -> str:
    """What a pydantic `ValidationError` says, one line per field; `whole` names the value itself."""
    found = cast("Iterable[dict[str, Any]]", error.errors()[:MAX_LINES])
    return "\n".join(f"{'.'.join(map(str, p['loc'])) or whole}: {p['msg']}" for p in found)


def _validator(schema: JsonObject) -> Any:
    import jsonschema.validators

    kind: Any = cast("Any", jsonschema.validators).validator_for(schema)
    try:
        kind.check_schema(schema)
    except cast("Any", jsonschema).SchemaError as error:
        raise ValueError(f"it is not a valid JSON schema ({error.message})") from error
    return kind(schema)
