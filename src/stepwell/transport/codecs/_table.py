"""A codec as a table: which events are single messages, which are streams, and what is in them.

An output event is an object with a `type`; an input event one with a `kind`. On the wire the codec header `kind` tells
the events of a codec apart; the other headers are the entry's fields.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from stepwell.errors import MisuseError
from stepwell.wire import Data, Headers

from ._fields import Field

__all__ = ["KIND", "PART_TYPE", "Event", "EventTable", "Input", "Output", "Phase", "Repair", "Stream", "UserMessage"]

Event: TypeAlias = dict[str, Any]

KIND: Final = "kind"
"""The codec header that tells the events of a codec apart."""

PART_TYPE: Final = "partType"
"""The codec header that tells the parts of a user's message apart."""

USER_MESSAGE: Final = "user-message"
"""Kind of the input with what a user says."""


def _empty(event: Mapping[str, Any]) -> Data:
    return ""


def _nothing(data: Any) -> Event:
    return {}


def _never(event: Mapping[str, Any]) -> bool:
    return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """An output that is one message, or one part of a user's message.

    Attributes:
        type: Of the event; with a trailing `-*`, of all that begin so.
        fields: Headers.
        encode: Event to data; a KeyError of it tells the caller what is missing.
        decode: Data, which may be anything, to keys of the event.
        ephemeral: Whether an event is live only: delivered, and not stored.
        named: The field that holds the `codec-message-id` where the event holds nothing.
    """

    type: str
    fields: Sequence[Field] = ()
    encode: Callable[[Mapping[str, Any]], Data] = _empty
    decode: Callable[[Any], Event] = _nothing
    ephemeral: Callable[[Mapping[str, Any]], bool] = _never
    named: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """Three events that make one message which grows.

    Attributes:
        kind: On the wire.
        start: Type of the event that opens it.
        delta: Of the one that holds text, under `delta_key`.
        end: Of the one that closes it.
        delta_key: See above.
        key: The event's key that tells streams apart; its value is the `stream-id`.
        only: The `stream-id` where there is one stream at a time; its events have no `key` then.
        fields: Headers.
        closing: Names of the fields that the end event may change; None for all.
        finish: Keys of the end event, from all the text.
        whole: Data of an end event whose stream was not opened: it is sent as one message. None refuses it.
        unwhole: The events of such a message, from its fields and data.
    """

    kind: str
    start: str
    delta: str
    end: str
    delta_key: str = "delta"
    key: str = "id"
    only: str | None = None
    fields: Sequence[Field] = ()
    closing: Sequence[str] | None = None
    finish: Callable[[str], Event] = _nothing
    whole: Callable[[Mapping[str, Any]], Data] | None = None
    unwhole: Callable[[Event, Any], Sequence[Event]] | None = None

    def stream_id(self, event: Mapping[str, Any]) -> str:
        """Of an event.

        Raises:
            MisuseError: The event has none.
        """
        if self.only is not None:
            return self.only
        found = event.get(self.key)
        if not isinstance(found, str):
            raise MisuseError(f"An output of type {event['type']!r} needs the text {self.key!r}.")
        return found

    def closing_fields(self) -> Sequence[Field]:
        """Fields of the end event."""
        return [field for field in self.fields if self.closing is None or field.name in self.closing]


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """An input that is one message: what a client says about a message.

    Attributes:
        kind: Of the event.
        fields: Headers.
        encode: Event to data.
        decode: Data, which may be anything, to keys of the event.
        wire_only: All its meaning is in the transport headers: readers make no event of it.
    """

    kind: str
    fields: Sequence[Field] = ()
    encode: Callable[[Mapping[str, Any]], Data] = _empty
    decode: Callable[[Any], Event] = _nothing
    wire_only: bool = False


def _role(message: Any) -> str:
    return message["role"]


def _no_headers(message: Any) -> Headers:
    return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class UserMessage:
    """What a user says: one message on the wire for each part, published in one call.

    Attributes:
        parts: By their type, which is the header `partType`; others are not sent.
        explode: The parts of a message, each an object with a `type`; not empty.
        assemble: A message of one part, from the part, the codec headers and the role. `fold` joins them.
        role: Of a message.
        headers: Codec headers that every part has.
    """

    parts: Sequence[Output]
    explode: Callable[[Any], Sequence[Mapping[str, Any]]]
    assemble: Callable[[Event, Headers, str], Any]
    role: Callable[[Any], str] = _role
    headers: Callable[[Any], Headers] = _no_headers


class Repair:
    """Events that a reader inserts because a writer left them out; one per decoder. This one inserts none."""

    def before(self, run_id: str, kind: str, headers: Headers, *, stream: bool) -> Sequence[Event]:
        """What has to come before an event of a run. `stream`: it begins a stream, or is one in one message."""
        return ()


Phase: TypeAlias = str
"""`start`, `delta` or `end`."""


class EventTable:
    """A table, with what is looked up in it.

    Args:
        outputs: Of agents.
        inputs: Of clients; `regenerate` is always there.
        user: How a user's message looks; None if there is none.
        repair: Makes the repair of one decoder.

    Raises:
        MisuseError: Two entries have the same name, or a field has one of the codec headers `kind` and `partType`.
    """

    def __init__(
        self,
        outputs: Sequence[Output | Stream],
        inputs: Sequence[Input] = (),
        *,
        user: UserMessage | None = None,
        repair: Callable[[], Repair] = Repair,
    ) -> None:
        inputs = (*inputs, Input(kind="regenerate", wire_only=True))
        self.user = user
        self.repair = repair
        self.inputs = {entry.kind: entry for entry in inputs}
        self.streams = {entry.kind: entry for entry in outputs if isinstance(entry, Stream)}
        self.phases = {name: (entry, phase) for entry in self.streams.values() for name, phase in _phases(entry)}
        self._outputs = _Lookup([entry for entry in outputs if isinstance(entry, Output)])
        self._parts = _Lookup(user.parts if user is not None else ())
        wire = [entry.kind if isinstance(entry, Stream) else entry.type for entry in outputs]
        events = [*self.phases, *(entry.type for entry in outputs if isinstance(entry, Output))]
        kinds = [*(entry.kind for entry in inputs), *([USER_MESSAGE] if user is not None else [])]
        types = [entry.type for entry in self._parts.entries]
        for names in (wire, events, kinds, types):
            for name in names:
                if names.count(name) > 1:
                    raise MisuseError(f"Two entries of the table are called {name!r}.")
        if len(self.phases) < 3 * len(self.streams):
            raise MisuseError("Two streams of the table, or two phases of one, have events of the same type.")
        for entry in (*outputs, *inputs, *self._parts.entries):
            for field in entry.fields:
                if field.name in (KIND, PART_TYPE):
                    raise MisuseError(f"The codec header {field.name!r} is taken: call the field something else.")

    def output(self, name: str) -> Output | None:
        """The entry of a single output."""
        return self._outputs.find(name)

    def part(self, name: str) -> Output | None:
        """The entry of a part of a user's message."""
        return self._parts.find(name)


def _phases(entry: Stream) -> Iterator[tuple[str, Phase]]:
    yield entry.start, "start"
    yield entry.delta, "delta"
    yield entry.end, "end"


class _Lookup:
    """Entries by name; those with a `-*` come last."""

    def __init__(self, entries: Sequence[Output]) -> None:
        self.entries = entries
        self._exact = {entry.type: entry for entry in entries}
        self._prefixes = [(entry.type[:-1], entry) for entry in entries if entry.type.endswith("-*")]

    def find(self, name: str) -> Output | None:
        found = self._exact.get(name)
        if found is None:
            found = next((entry for prefix, entry in self._prefixes if name.startswith(prefix)), None)
        return found
