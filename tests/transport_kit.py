"""A channel for tests of the transport: a log with the reference's rules of delivery, written without the product's."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio

from stepwell.errors import ChannelError
from stepwell.transport import ClientSession
from stepwell.transport.codecs import UIMessageCodec
from stepwell.wire import Cursor, Delivery, Gap, HistoryPage, WireMessage

FIXTURES = Path(__file__).parent / "fixtures" / "wire"

ALL_CHUNKS: list[dict[str, Any]] = [
    {"type": "start", "messageMetadata": {"model": "m1"}},
    {"type": "start-step"},
    {"type": "reasoning-start", "id": "r1", "providerMetadata": {"p": {"k": 1}}},
    {"type": "reasoning-delta", "id": "r1", "delta": "think"},
    {"type": "reasoning-end", "id": "r1"},
    {"type": "text-start", "id": "t1"},
    {"type": "text-delta", "id": "t1", "delta": "Weather "},
    {"type": "text-delta", "id": "t1", "delta": "soon"},
    {"type": "text-end", "id": "t1", "providerMetadata": {"p": {"end": True}}},
    {"type": "tool-input-start", "toolCallId": "c1", "toolName": "getWeather", "title": "Weather"},
    {"type": "tool-input-delta", "toolCallId": "c1", "inputTextDelta": '{"city":'},
    {"type": "tool-input-delta", "toolCallId": "c1", "inputTextDelta": '"Rome"}'},
    {"type": "tool-input-available", "toolCallId": "c1", "toolName": "getWeather", "input": {"city": "Rome"}},
    {"type": "tool-output-available", "toolCallId": "c1", "output": {"t": 20}, "preliminary": True},
    {"type": "tool-output-available", "toolCallId": "c1", "output": {"t": 21}},
    {"type": "tool-input-available", "toolCallId": "c2", "toolName": "search", "input": {"q": "x"}, "dynamic": True},
    {"type": "tool-output-error", "toolCallId": "c2", "errorText": "nope"},
    {"type": "tool-input-error", "toolCallId": "c3", "toolName": "calc", "input": "1+", "errorText": "bad input"},
    {"type": "tool-input-start", "toolCallId": "c4", "toolName": "pay"},
    {"type": "tool-input-available", "toolCallId": "c4", "toolName": "pay", "input": {"n": 1}},
    {"type": "tool-approval-request", "toolCallId": "c4", "approvalId": "ap1"},
    {"type": "tool-output-denied", "toolCallId": "c4"},
    {"type": "file", "mediaType": "text/plain", "url": "data:text/plain,hi"},
    {"type": "source-url", "sourceId": "s1", "url": "https://x.test", "title": "X"},
    {"type": "source-document", "sourceId": "s2", "mediaType": "application/pdf", "title": "Doc", "filename": "d.pdf"},
    {"type": "data-progress", "id": "p1", "data": {"pct": 10}},
    {"type": "data-progress", "id": "p1", "data": {"pct": 90}},
    {"type": "data-ping", "data": {"n": 1}, "transient": True},
    {"type": "message-metadata", "messageMetadata": {"tokens": 5}},
    {"type": "finish-step"},
    {"type": "finish", "finishReason": "stop", "messageMetadata": {"done": True}},
]
"""The outputs of the trace `all-chunks`."""


def trace(name: str) -> dict[str, Any]:
    return json.loads((FIXTURES / f"golden-{name}.json").read_text(encoding="utf-8"))


TRACES = sorted(path.stem.removeprefix("golden-") for path in FIXTURES.glob("golden-*.json"))


class LogChannel:
    """An ordered log. `first_append_as_update`: as the service does it, also for readers that saw the create."""

    name = "conversations:test"

    def __init__(self, *, first_append_as_update: bool = False) -> None:
        self.log: list[Delivery] = []  # as they were said
        self.ephemeral: set[str] = set()
        self.failures: list[Exception] = []  # raised by the next calls of publish, one each; None lets one through
        self.history_failures: list[Exception] = []
        self.after_failure_stored = False
        self.published: list[Sequence[WireMessage]] = []
        self.subscriptions: list[LogSubscription] = []
        self.ids: dict[str, str] = {}
        self.pages = 0
        self.first_append_as_update = first_append_as_update
        self._numbers = itertools.count(1)
        self._more = anyio.Event()

    # -- writing

    def say(
        self,
        name: str,
        transport: Mapping[str, str],
        data: Any = None,
        codec: Mapping[str, str] | None = None,
        *,
        serial: str | None = None,
        client_id: str | None = None,
        time: int | None = None,
        extras: Mapping[str, Any] | None = None,
    ) -> str:
        number = next(self._numbers)
        serial = serial or f"{number:014d}-000@aaaaaaaaaa:000"
        ai: dict[str, Any] = {"transport": dict(transport)}
        if codec:
            ai["codec"] = dict(codec)
        self._add(
            Delivery(
                cursor=self.end,
                action="create",
                serial=serial,
                version=serial,
                name=name,
                data=data,
                extras=extras if extras is not None else {"ai": ai},
                client_id=client_id,
                timestamp=time if time is not None else number,
            )
        )
        return serial

    def mutate(
        self, serial: str, data: Any, extras: Any, *, action: Any = "append", version: str | None = None, time: int = 0
    ) -> str:
        number = next(self._numbers)
        version = version or f"{number:014d}-000@aaaaaaaaaa:000"
        old = next(one for one in reversed(self.log) if one.serial == serial)
        self._add(
            Delivery(
                cursor=self.end,
                action=action,
                serial=serial,
                version=version,
                name=None if action == "append" else self.whole(serial, len(self.log)).name,
                data=data,
                extras=old.extras if extras is None else extras,
                client_id=old.client_id,
                timestamp=time or number,
            )
        )
        return version

    def _add(self, delivery: Delivery) -> None:
        self.log.append(delivery)
        self.wake()

    def wake(self) -> None:
        self._more.set()
        self._more = anyio.Event()

    @property
    def end(self) -> Cursor:
        return Cursor(str(len(self.log)))

    async def publish(self, messages: Sequence[WireMessage], *, epoch: int | None = None) -> list[str]:
        await anyio.lowlevel.checkpoint()
        self.published.append(messages)
        failure = self.failures.pop(0) if self.failures else None
        if failure is not None and not self.after_failure_stored:
            raise failure
        serials: list[str] = []
        for message in messages:
            known = self.ids.get(message.idempotency_id or "")
            if known is None:
                known = self.say(
                    message.name, {}, message.data, extras=message.extras or {}, client_id=message.client_id
                )
                self.ids[message.idempotency_id or ""] = known
            serials.append(known)
        if failure is not None:
            raise failure
        return serials

    async def append(self, serial: str, data: str, extras: Any, *, seq: int, epoch: int | None = None) -> str:
        return self.mutate(serial, data, extras)

    async def update(self, serial: str, data: Any, extras: Any, *, epoch: int | None = None) -> str:
        return self.mutate(serial, data, extras, action="update")

    async def raise_fence(self, epoch: int) -> None:
        raise NotImplementedError

    # -- reading

    def whole(self, serial: str, upto: int) -> Delivery:
        """A message with everything that was said of it in the first `upto` rows."""
        rows = [one for one in self.log[:upto] if one.serial == serial]
        data, extras = rows[0].data, rows[0].extras
        for row in rows[1:]:
            data = data + row.data if row.action == "append" else row.data
            extras = row.extras
        last = rows[-1]
        return Delivery(
            cursor=last.cursor,
            action="create" if len(rows) == 1 else "update",
            serial=serial,
            version=last.version,
            name=rows[0].name,
            data=data,
            extras=extras,
            client_id=rows[0].client_id,
            timestamp=last.timestamp,
        )

    @contextlib.asynccontextmanager
    async def subscribe(self, *, after: Cursor | None = None) -> AsyncGenerator[LogSubscription]:
        subscription = LogSubscription(self, len(self.log) if after is None else int(after))
        self.subscriptions.append(subscription)
        yield subscription

    async def history(self, *, before: Cursor | None = None, limit: int = 100) -> HistoryPage:
        await anyio.lowlevel.checkpoint()
        if self.history_failures:
            raise self.history_failures.pop(0)
        self.pages += 1
        upto = len(self.log) if before is None else int(before)
        serials = [one.serial for one in self.log[:upto] if one.action == "create" and one.serial not in self.ephemeral]
        newest = [self.whole(serial, len(self.log)) for serial in reversed(serials)]
        page, rest = newest[:limit], newest[limit:]
        place = next((i for i, one in enumerate(self.log) if rest and one.serial == rest[0].serial), 0)
        return HistoryPage(items=page, next=Cursor(str(place + 1)) if rest else None)

    def renumber(self) -> None:
        """As a channel of the same name that came after this one was deleted."""
        self._numbers = itertools.count(1)

    def lose(self, *, forget: Sequence[str] = ()) -> None:
        """The log up to here is gone: readers get a gap and a snapshot. Messages in `forget` are gone altogether."""
        self.log = [one for one in self.log if one.serial not in forget]
        for subscription in self.subscriptions:
            subscription.gap()
        self.wake()


class LogSubscription:
    def __init__(self, channel: LogChannel, position: int) -> None:
        self.channel = channel
        self.begin = position
        self.position = position
        self.met: set[str] = set()
        self.pending: list[Delivery | Gap] = []
        self.paused = False

    @property
    def start(self) -> Cursor:
        return Cursor(str(self.begin))

    def gap(self) -> None:
        log = self.channel.log
        serials = [one.serial for one in log if one.action == "create"]
        self.pending.append(Gap(cursor=self.channel.end))
        for serial in serials:
            self.pending.append(_as_update(self.channel.whole(serial, len(log))))
        self.position = len(log)
        self.met = set(serials)

    async def read(self, limit: int = 256) -> Sequence[Delivery | Gap]:
        while self.paused or not (self.pending or self.position < len(self.channel.log)):
            await self.channel._more.wait()
        if self.pending:
            items, self.pending = self.pending[:limit], self.pending[limit:]
            return items
        out: list[Delivery | Gap] = []
        while self.position < len(self.channel.log) and len(out) < limit:
            row = self.channel.log[self.position]
            self.position += 1
            first = row.serial not in self.met
            if row.action == "create":
                if not self.channel.first_append_as_update:
                    self.met.add(row.serial)
                out.append(row)
            elif first:
                self.met.add(row.serial)
                out.append(_as_update(self.channel.whole(row.serial, self.position)))
            else:
                out.append(row)
        return out

    def __aiter__(self) -> LogSubscription:
        return self

    async def __anext__(self) -> Delivery | Gap:
        return (await self.read(1))[0]


class BrokenChannel(LogChannel):
    """Cannot be read."""

    @contextlib.asynccontextmanager
    async def subscribe(self, *, after: Cursor | None = None) -> AsyncGenerator[LogSubscription]:
        raise ChannelError("Nothing there.")
        yield  # pragma: no cover


def _as_update(whole: Delivery) -> Delivery:
    return Delivery(
        cursor=whole.cursor,
        action="update",
        serial=whole.serial,
        version=whole.version,
        name=whole.name,
        data=whole.data,
        extras=whole.extras,
        client_id=whole.client_id,
        timestamp=whole.timestamp,
    )


async def settled() -> None:
    """Everybody has read everything."""
    await anyio.wait_all_tasks_blocked()


def client(channel: Any, codec: Any = None, **options: Any) -> ClientSession[Any, Any]:
    return ClientSession(channel, codec or UIMessageCodec(), **options)


def shown(view: Any) -> list[str]:
    """`role:text` of every message, as the harness prints it."""
    return [
        f"{one.message['role']}:{'|'.join(part['text'] for part in one.message['parts'] if part['type'] == 'text')}"
        for one in view.messages
    ]


def golden(view: Any) -> list[Any]:
    """The form of a trace's `clientView`."""
    return [{"codecMessageId": one.codec_message_id, "message": one.message} for one in view.messages]


def steps(run: Any) -> list[dict[str, Any]]:
    """The form of a trace's `steps`."""
    return [
        {
            "stepId": one.step_id,
            "status": one.status,
            "attemptCount": one.attempt_count,
            "stepClientId": one.step_client_id,
        }
        for one in run.steps
    ]


class Agent:
    """Says what an agent says, by hand, as the probes of the harness do."""

    def __init__(self, channel: LogChannel) -> None:
        self.channel = channel

    def ask(self, message_id: str, text: str, **headers: str) -> str:
        given = {key.replace("_", "-"): value for key, value in headers.items()}
        transport = {
            "role": "user",
            "codec-message-id": message_id,
            "event-id": f"e-{message_id}",
            "stream": "false",
            "discrete": "true",
            **given,
        }
        codec = {"kind": "user-message", "partType": "text", "messageId": message_id}
        return self.channel.say("ai-input", transport, text, codec)

    def run(self, verb: str, run: str = "R", *, time: int | None = None, **headers: str) -> str:
        given = {key.replace("_", "-"): value for key, value in headers.items()}
        return self.channel.say(f"ai-run-{verb}", {"run-id": run, **given}, time=time)

    def step(self, step: str, run: str = "R", **headers: str) -> str:
        given = {key.replace("_", "-"): value for key, value in headers.items()}
        return self.channel.say("ai-step-start", {"run-id": run, "step-id": step, **given})

    def end(self, step: str, serial: str, reason: str = "complete", run: str = "R") -> str:
        return self.channel.say(
            "ai-step-end", {"run-id": run, "step-id": step, "step-start-serial": serial, "step-reason": reason}
        )

    def output(self, kind: str, data: Any, message_id: str = "A1", run: str = "R", **more: Any) -> str:
        """A discrete output; `codec` holds its fields, `step` and `serial` its attempt."""
        transport = {**_output(message_id, run, more), "stream": "false"}
        return self.channel.say("ai-output", transport, data, {"kind": kind, **more.get("codec", {})})

    def open(self, message_id: str = "A1", run: str = "R", stream: str = "t1", **more: Any) -> tuple[str, Any]:
        """Begin a stream of text."""
        transport = {**_output(message_id, run, more), "stream": "true", "status": "streaming", "stream-id": stream}
        extras = {"ai": {"transport": transport, "codec": {"kind": "text", "id": stream}}}
        return self.channel.say("ai-output", {}, "", extras=extras), extras

    def append(self, stream: tuple[str, Any], text: str, status: str = "streaming") -> str:
        serial, extras = stream
        ai = extras["ai"]
        changed = {"ai": {**ai, "transport": {**ai["transport"], "status": status}}}
        return self.channel.mutate(serial, text, changed)

    def say(self, text: str, message_id: str = "A1", run: str = "R", *, close: bool = True, **more: Any) -> Any:
        """A stream of text, whole."""
        stream = self.open(message_id, run, **more)
        self.append(stream, text)
        if close:
            self.append(stream, "", "complete")
        return stream


def _output(message_id: str, run: str, more: Mapping[str, Any]) -> dict[str, str]:
    names = {
        "step": "step-id",
        "serial": "step-start-serial",
        "parent": "parent",
        "input": "input-codec-message-id",
        "steers": "steer-codec-message-ids",
    }
    return {
        "role": "assistant",
        "codec-message-id": message_id,
        "run-id": run,
        **{header: more[key] for key, header in names.items() if more.get(key) is not None},
    }


def replay(channel: LogChannel, operation: Mapping[str, Any]) -> None:
    """Say one operation of a trace."""
    if "error" in operation or operation["op"] not in ("publish", "append", "update"):
        return
    by = operation["by"]
    if operation["op"] == "publish":
        for message, serial in zip(operation["messages"], operation["serials"], strict=True):
            channel.say(
                message["name"],
                {},
                message.get("data"),
                extras=message.get("extras") or {},
                serial=serial,
                client_id=by,
            )
    else:
        message = operation["message"]
        channel.mutate(
            message["serial"],
            message.get("data"),
            message.get("extras"),
            action=operation["op"],
            version=operation["versionSerial"],
        )
