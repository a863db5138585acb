"""The UI codec and the unmodified JavaScript SDK's, side by side: the same messages after every delivery.

Random chunks and inputs, well-formed or not, in every form in which a channel may deliver them.
"""

from __future__ import annotations

import json
import random
import subprocess
from typing import Any

import anyio
import pytest

from codec_kit import HEADERS, Log, live, snapshot
from servers import node
from stepwell.errors import InvalidInputError, MisuseError
from stepwell.transport._codec import FoldMeta
from stepwell.transport.codecs import UIMessageCodec
from stepwell.wire import Cursor, Delivery, transport_headers

CODEC = UIMessageCodec()
CASES = 250

TEXTS = ["a", "{", "}", '"x"', "1", "tr", "ue", "null", "[", "]", ",", ":", " ", "é😀", '{"a": 1}', "12", "\n"]


class Talk:
    """Makes up what is said."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def maybe(self, chance: float, **keys: Any) -> dict[str, Any]:
        return keys if self.random.random() < chance else {}

    def chunk(self) -> dict[str, Any]:
        pick = self.random.choice
        own, text = pick(["x", "y"]), pick(TEXTS)
        call = {"toolCallId": own}
        given = pick(["s", [1, {"b": None}], {"c": "d"}, {}])
        value = pick([given, 1, None])
        provided = self.maybe(0.2, providerMetadata={"p": {"k": pick([1, None, "x"])}})
        metadata = self.maybe(0.5, messageMetadata=pick([{"a": 1}, "x", [1]]))
        tool = {
            **call,
            "toolName": pick(["pay", "look"]),
            **self.maybe(0.3, dynamic=pick([True, False])),
            **self.maybe(0.3, title="T"),
            **self.maybe(0.3, providerExecuted=True),
        }
        bodies: dict[str, dict[str, Any]] = {
            "text-start": {"id": own, **provided},
            "text-delta": {"id": own, "delta": text},
            "text-end": {"id": own, **provided},
            "reasoning-start": {"id": own},
            "reasoning-delta": {"id": own, "delta": text},
            "reasoning-end": {"id": own},
            "tool-input-start": {**tool, **provided},
            "tool-input-delta": {**call, "inputTextDelta": text},
            "tool-input-available": {**tool, "input": given, **provided},
            "tool-input-error": {**tool, "input": value, "errorText": "e"},
            "tool-output-available": {**call, "output": value, **self.maybe(0.3, preliminary=True)},
            "tool-output-error": {**call, "errorText": "e"},
            "tool-approval-request": {**call, "approvalId": "ap"},
            "tool-output-denied": call,
            "file": {"mediaType": "a/b", "url": "u"},
            "source-url": {"sourceId": "s", "url": "u", **self.maybe(0.5, title="t")},
            "source-document": {"sourceId": "s", "mediaType": "m", "title": "t", **self.maybe(0.5, filename="f")},
            "data-d": {"data": given, **self.maybe(0.5, id=own), **self.maybe(0.2, transient=True)},
            "data-e": {"data": given, "id": own},
            "start": {**metadata, **self.maybe(0.5, messageId="M")},
            "start-step": {},
            "finish-step": {},
            "finish": {**metadata, "finishReason": pick(["stop", "length", "?"])},
            "error": {"errorText": "e"},
            "abort": {},
            "message-metadata": metadata,
        }
        kind = pick([*bodies, "text-delta", "tool-input-delta"])
        return {"type": kind, **bodies[kind]}

    def said(self, log: Log) -> None:
        """A client says something."""
        pick = self.random.choice
        target, call = pick(["m-1", "m-2"]), pick(["x", "y"])
        parts: list[dict[str, Any]] = [
            {"type": "text", "text": pick(TEXTS)},
            {"type": "file", "mediaType": "m", "url": "u"},
            {"type": "data-q", "data": {"a": 1}, **self.maybe(0.5, id="1")},
        ]
        event = pick(
            [
                CODEC.create_tool_result(target, call, pick([None, 1, {"a": None}])),
                CODEC.create_tool_result_error(target, call, "bad"),
                CODEC.create_tool_approval_response(
                    target, call, approved=pick([True, False]), reason=pick([None, "why"])
                ),
                CODEC.create_user_message({"id": "u", "role": "user", "parts": parts}),
                CODEC.create_regenerate(target, None),
            ]
        )
        headers = {"codec-message-id": CODEC.target_of(event) or "U", "run-id": "r-1", "role": "user"}
        for message in CODEC.encode_input(event, headers):
            log.add("create", "", message.name, message.data, message.extras)

    async def rows(self) -> list[Delivery]:
        log = Log()
        for message_id in self.random.sample(["m-1", "m-2"], self.random.randrange(1, 3)):

            async def headers(message_id: str = message_id) -> dict[str, str]:
                return {**HEADERS, "codec-message-id": message_id}

            encoder = CODEC.create_encoder(log, headers, message_id=message_id, roll_up=self.random.choice([0, 0.02]))
            for _ in range(self.random.randrange(16)):
                if self.random.random() < 0.15:
                    self.said(log)
                try:
                    await encoder.publish_output(self.chunk())
                except (MisuseError, InvalidInputError):
                    continue  # a stream that is not open
            if self.random.random() < 0.5:
                await encoder.finish()
            await encoder.close()
        return log.rows

    async def case(self) -> list[Delivery]:
        rows = await self.rows()
        joined, form = self.random.randrange(len(rows) + 1), self.random.random()
        if form < 0.3:
            rows = [*snapshot(rows, joined), *live(rows, joined, self.random)]
        elif form < 0.7:
            rows = live(rows, 0, self.random)
        if rows and self.random.random() < 0.3:
            odd = self.random.choice(rows)  # what other writers may do
            version = odd.version + self.random.choice(["", "z"])
            data, action = self.random.choice(["", "zzz", None]), self.random.choice(["update", "delete"])
            rows = [*rows, _delivery(odd, action, version, data)]
        return rows


def _delivery(odd: Delivery, action: Any, version: str, data: Any) -> Delivery:
    return Delivery(
        cursor=Cursor("z"),
        action=action,
        serial=odd.serial,
        version=version,
        name="ai-output",
        data=data,
        extras=odd.extras,
    )


def as_ably(delivery: Delivery) -> dict[str, Any]:
    message = {"name": delivery.name, "data": delivery.data, "extras": delivery.extras}
    return {
        "action": f"message.{delivery.action}",
        "serial": delivery.serial,
        "version": {"serial": delivery.version},
        **{key: value for key, value in message.items() if value is not None},
    }


def after_each(deliveries: list[Delivery]) -> list[Any]:
    decoder, projection, shown = CODEC.create_decoder(), CODEC.init(), []
    for delivery in deliveries:
        decoded = decoder.decode(delivery)
        meta = FoldMeta(delivery.serial, transport_headers(delivery.extras)["codec-message-id"])
        for event in decoded.inputs:
            projection = CODEC.fold(projection, "input", event, meta)
        for event in decoded.outputs:
            projection = CODEC.fold(projection, "output", event, meta)
        shown.append(
            [{"codecMessageId": one.codec_message_id, "message": one.message} for one in CODEC.get_messages(projection)]
        )
    return shown


@pytest.mark.parametrize("seed", range(4))
def test_the_same_messages_after_every_delivery(seed: int) -> None:
    talk = Talk(seed)
    cases = [anyio.run(talk.case) for _ in range(CASES)]
    given = json.dumps([[as_ably(delivery) for delivery in case] for case in cases])
    answer = subprocess.run(node("fold.mjs"), input=given, capture_output=True, check=True, text=True, timeout=60)
    for case, expected in zip(cases, json.loads(answer.stdout), strict=True):
        for place, (shown, theirs) in enumerate(zip(after_each(case), expected, strict=True)):
            assert shown == theirs, [as_ably(delivery) for delivery in case[: place + 1]]
