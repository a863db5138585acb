"""The pointer from an HTTP request to the input on the channel that it is about."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stepwell.errors import InvalidInputError

__all__ = ["Invocation"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Invocation:
    """What an agent is invoked with. It holds no ids of the agent's: run and invocation ids are made by the agent.

    Attributes:
        input_event_id: The `event-id` of the input to be answered. Empty for an agent that begins by itself.
        session_name: Name of the channel.
    """

    input_event_id: str
    session_name: str

    def to_json(self) -> dict[str, str]:
        """The body of the request: `{"inputEventId": ..., "sessionName": ...}`."""
        return {"inputEventId": self.input_event_id, "sessionName": self.session_name}

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Invocation:
        """Read it from a request's body; other fields are the application's and are not looked at.

        Raises:
            InvalidInputError: A field is missing or no text.
        """
        return cls(
            input_event_id=_text(body, "inputEventId"),
            session_name=_text(body, "sessionName"),
        )


def _text(body: Mapping[str, Any], key: str) -> str:
    value = body.get(key)
    if not isinstance(value, str):
        raise InvalidInputError(f"The body needs the text {key!r}: send what `to_invocation()` gave.", f"/{key}")
    return value
