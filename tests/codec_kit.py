"""A writer that records, deliveries in every form a channel may give them, and folding without a tree."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import anyio
import msgspec

from stepwell.errors import AppendGapError, ChannelError
from stepwell.transport._codec import CodecMessage, Direction, FoldMeta
from stepwell.transport.codecs import EventTable, Output, Stream, TableCodec, UserMessage, text_field
from stepwell.wire import Cursor, Delivery, WireMessage, transport_headers
from transport_kit import trace

HEADERS = {"role": "assistant", "codec-message-id": "m-1", "run-id": "r-1"}


async def opened() -> Mapping[str, str]:
    return HEADERS


class Log:
    """An encoder's channel: a list of mutations. `fault(operation, number)` may say `lost` or `refused`."""

    def __init__(self, fault: Callable[[str, int], str | None] = lambda what, number: None) -> None:
        self.rows: list[Delivery] = []
        self.calls: list[str] = []
        self.appended: dict[str, int] = {}
        self.ids: dict[str, str] = {}
        self.fault = fault
        self.gate: anyio.Event | None = None
        """Where set, an append waits for it."""

    @property
    def said(self) -> list[tuple[str, Any]]:
        return [(row.action, row.data) for row in self.rows]

    def add(self, action: Any, serial: str, name: str | None, data: Any, extras: Any) -> str:
        version = f"{len(self.rows):08d}"
        self.rows.append(
            Delivery(
                cursor=Cursor(version),
                action=action,
                serial=serial or version,
                version=version,
                name=name,
                data=data,
                extras=copy.deepcopy(extras),
            )
        )
        return serial or version

    def _fault(self, what: str) -> str | None:
        self.calls.append(what)
        fault = self.fault(what, len(self.calls) - 1)
        if fault == "refused":
            raise ChannelError("Refused.")
        return fault

    async def publish(self, messages: Sequence[WireMessage]) -> list[str]:
        fault = self._fault("publish")
        serials: list[str] = []
        for message in messages:
            assert message.idempotency_id is not None
            serial = self.ids.get(message.idempotency_id)
            if serial is None:
                serial = self.add("create", "", message.name, message.data, message.extras)
                self.ids[message.idempotency_id] = serial
            serials.append(serial)
        if fault == "lost":
            raise ChannelError("Lost.")
        return serials

    async def append(self, serial: str, data: str, extras: Any, *, seq: int) -> str:
        fault = self._fault("append")
        if self.gate is not None:
            await self.gate.wait()
        applied = self.appended.get(serial, 0)
        if seq > applied + 1:
            raise AppendGapError("A gap.", applied)
        if seq == applied + 1:
            self.add("append", serial, None, data, extras)
            self.appended[serial] = seq
        if fault == "lost":
            raise ChannelError("Lost.")
        return self.rows[-1].version

    async def update(self, serial: str, data: Any, extras: Any) -> str:
        fault = self._fault("update")
        self.add("update", serial, self.whole(serial).name, data, extras)
        if fault == "lost":
            raise ChannelError("Lost.")
        return self.rows[-1].version

    def whole(self, serial: str, upto: int | None = None) -> Delivery:
        return whole([row for row in self.rows[:upto] if row.serial == serial])

    def history(self) -> list[Delivery]:
        """Oldest first."""
        return [self.whole(row.serial) for row in self.rows if row.action == "create"]


def whole(rows: Sequence[Delivery]) -> Delivery:
    """A message after these mutations of it."""
    data, extras = rows[0].data, rows[0].extras
    for row in rows[1:]:
        data = data + row.data if row.action == "append" and isinstance(data, str) else row.data
        extras = row.extras
    return Delivery(
        cursor=rows[-1].cursor,
        action="create" if len(rows) == 1 else "update",
        serial=rows[0].serial,
        version=rows[-1].version,
        name=rows[0].name,
        data=data,
        extras=extras,
    )


class Reader:
    """Decodes, and folds what belongs together in the order of serials, as the conversation's tree does."""

    def __init__(self, codec: Any) -> None:
        self.codec = codec
        self.decoder = codec.create_decoder()
        self.nodes: dict[str, dict[str, list[tuple[Any, Any, str]]]] = {}
        self.attempts: dict[tuple[str, str], str] = {}  # the last start of a step

    def read(self, deliveries: Iterable[Delivery]) -> Reader:
        for delivery in deliveries:
            headers = transport_headers(delivery.extras)
            if delivery.name == "ai-step-start":
                step = headers.get("run-id", ""), headers.get("step-id", "")
                self.attempts[step] = max(self.attempts.get(step, ""), delivery.serial)
            decoded = self.decoder.decode(delivery)
            events = [*(("input", one) for one in decoded.inputs), *(("output", one) for one in decoded.outputs)]
            message_id = headers.get("codec-message-id", "")
            rows = self.nodes.setdefault(headers.get("run-id", message_id), {}).setdefault(delivery.serial, [])
            rows.extend((events_of, message_id, headers) for events_of in events)  # type: ignore[misc]
        return self

    @property
    def messages(self) -> list[dict[str, Any]]:
        """As a trace's `clientView` has them."""
        shown: list[dict[str, Any]] = []
        nodes = [node for node in self.nodes.values() if any(node.values())]
        for node in sorted(nodes, key=lambda node: min(serial for serial, rows in node.items() if rows)):
            projection = self.codec.init()
            for serial in sorted(node):
                for (direction, event), message_id, headers in node[serial]:
                    step = headers.get("run-id", ""), headers.get("step-id", "")
                    if headers.get("step-start-serial") == self.attempts.get(step, headers.get("step-start-serial")):
                        projection = self.codec.fold(projection, direction, event, FoldMeta(serial, message_id))
            shown += [
                {"codecMessageId": one.codec_message_id, "message": one.message}
                for one in self.codec.get_messages(projection)
            ]
        return shown


def deliveries(operations: Iterable[Mapping[str, Any]]) -> list[Delivery]:
    """A trace's `published`, as somebody gets it who was there."""
    rows: list[Delivery] = []
    for operation in operations:
        if "error" in operation or operation["op"] == "presence":
            continue
        if operation["op"] == "publish":
            for message, serial in zip(operation["messages"], operation["serials"], strict=True):
                rows.append(_delivery("create", serial, serial, message))
        else:
            message = operation["message"]
            name = next(row.name for row in rows if row.serial == message["serial"])
            given = message if operation["op"] == "append" else {**message, "name": name}
            rows.append(_delivery(operation["op"], message["serial"], operation["versionSerial"], given))
    return rows


def history(name: str) -> list[Delivery]:
    """A trace's history, oldest first."""
    return [
        _delivery(item["action"].removeprefix("message."), item["serial"], item["version"]["serial"], item)
        for item in reversed(trace(name)["history_newest_first"])
    ]


def _delivery(action: Any, serial: str, version: str, message: Mapping[str, Any]) -> Delivery:
    return Delivery(
        cursor=Cursor(version),
        action=action,
        serial=serial,
        version=version,
        name=message.get("name"),
        data=message.get("data"),
        extras=message.get("extras"),
    )


def outputs(name: str) -> list[tuple[Any, ...]]:
    """What an agent wrote in a trace, and what it wrote on."""
    said: list[tuple[Any, ...]] = []
    serials: list[str] = []
    for operation in trace(name)["published"]:
        for place, message in enumerate(operation.get("messages") or [operation.get("message", {})]):
            if message.get("name") == "ai-output":
                serials.append(operation["serials"][place])
                said.append(("create", len(serials) - 1, message.get("data"), message["extras"]))
            elif operation["op"] != "publish" and message["serial"] in serials:
                said.append((operation["op"], serials.index(message["serial"]), message["data"], message["extras"]))
    return said


def written(log: Log) -> list[tuple[Any, ...]]:
    """The same of an encoder's log."""
    serials = [row.serial for row in log.rows if row.action == "create"]
    return [(row.action, serials.index(row.serial), row.data, row.extras) for row in log.rows]


def live(rows: list[Delivery], joined: int, choice: random.Random) -> list[Delivery]:
    """As a subscriber gets the log who joins there: merged appends, full versions in their place, some things twice."""
    out: list[Delivery] = []
    met: set[str] = set()
    place = joined
    while place < len(rows):
        row = rows[place]
        if row.action == "append":
            while choice.random() < 0.5 and place + 1 < len(rows) and rows[place + 1].serial == row.serial:
                place += 1
        newest = _whole(rows[: place + 1], row.serial)
        if row.action == "append" and (row.serial not in met or choice.random() < 0.3):
            out.append(_update(newest))
        elif row is not rows[place]:
            merged = "".join(one.data for one in rows[rows.index(row) : place + 1])
            out.append(msgspec.structs.replace(row, version=newest.version, data=merged, extras=newest.extras))
        else:
            out.append(row)
        met.add(row.serial)
        if choice.random() < 0.2:
            out.append(choice.choice(out))
        place += 1
    return out


def snapshot(rows: list[Delivery], joined: int) -> list[Delivery]:
    """Every message as somebody reads it from history who joins there, oldest first."""
    return [_whole(rows[:joined], row.serial) for row in rows[:joined] if row.action == "create"]


def _whole(rows: list[Delivery], serial: str) -> Delivery:
    return whole([row for row in rows if row.serial == serial])


def _update(newest: Delivery) -> Delivery:
    return Delivery(
        cursor=newest.cursor,
        action="update",
        serial=newest.serial,
        version=newest.version,
        name=newest.name,
        data=newest.data,
        extras=newest.extras,
    )


# -- a codec of one's own

Said = dict[str, dict[str, str]]


class TinyCodec(TableCodec[dict[str, str], Said]):
    """That of the trace `custom-codec`."""

    tag = "tiny"
    table = EventTable(
        (
            Stream(
                kind="txt",
                start="begin",
                delta="tok",
                end="stop",
                delta_key="t",
                only="s",
                fields=(text_field("lang"),),
            ),
            Output(
                type="note",
                fields=(text_field("level"),),
                encode=lambda note: {"body": note["body"]},
                decode=lambda data: {"body": data["body"]},
            ),
        ),
        user=UserMessage(
            parts=(Output(type="text", encode=lambda part: part["text"], decode=lambda data: {"text": data}),),
            explode=lambda message: [{"type": "text", "text": message["text"]}],
            assemble=lambda part, codec, role: {"role": role, "text": part["text"]},
        ),
    )

    def init(self) -> Said:
        return {}

    def fold(self, projection: Said, direction: Direction, event: Any, meta: FoldMeta) -> Said:
        if direction == "input":
            return {**projection, meta.message_id: event["message"]}
        known = projection.get(meta.message_id, {"role": "assistant", "text": ""})
        return {**projection, meta.message_id: {**known, "text": known["text"] + event.get("t", "")}}

    def get_messages(self, projection: Said) -> Sequence[CodecMessage[dict[str, str]]]:
        return [CodecMessage(message_id, message) for message_id, message in projection.items()]
