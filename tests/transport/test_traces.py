"""Every golden trace of the JavaScript SDK reads to the view that the trace records: live, late, and from history."""

from __future__ import annotations

from typing import Any

import pytest

from stepwell.transport import CodecMessage, Decoded
from stepwell.transport.codecs import UIMessageCodec
from stepwell.wire import Delivery, codec_headers
from transport_kit import TRACES, LogChannel, client, golden, replay, settled, steps, trace

pytestmark = pytest.mark.anyio

SEEN_UP_TO = {"all-chunks": 34}
"""Where the trace's view was read before the scenario was over: operations until then."""

OWN_CODEC = "custom-codec"

LATE_VIEW = {"append-recovery": "lateView"}
"""Where somebody who was there does not see what is in the end: an append was lost, and replaced by the whole text."""


class TinyCodec:
    """The codec of that trace, as far as a reader needs one, and without any help of the package."""

    tag = "tiny"

    def init(self) -> dict[str, Any]:
        return {}

    def fold(self, projection: dict[str, Any], direction: str, event: Any, meta: Any) -> dict[str, Any]:
        role = "user" if direction == "input" else "assistant"
        known = projection.get(meta.message_id, {"role": role, "text": ""})
        projection[meta.message_id] = {**known, "text": known["text"] + event}
        return projection

    def get_messages(self, projection: dict[str, Any]) -> list[CodecMessage[Any]]:
        return [CodecMessage(message_id, message) for message_id, message in projection.items()]

    def create_decoder(self) -> TinyDecoder:
        return TinyDecoder()


class TinyDecoder:
    def __init__(self) -> None:
        self.texts: dict[str, tuple[str, str]] = {}  # by serial: what was read, and up to which version

    def decode(self, delivery: Delivery) -> Decoded:
        kind = codec_headers(delivery.extras).get("kind")
        if kind == "user-message":
            return Decoded(inputs=[delivery.data])
        if kind != "txt":
            return Decoded(outputs=[""] if kind == "note" else [])
        text, version = self.texts.get(delivery.serial, ("", ""))
        if delivery.version <= version:
            return Decoded()
        new = str(delivery.data) if delivery.action == "append" else str(delivery.data)[len(text) :]
        self.texts[delivery.serial] = (text + new, delivery.version)
        return Decoded(outputs=[new])


def codec_of(name: str) -> Any:
    return TinyCodec() if name == OWN_CODEC else UIMessageCodec()


def operations(name: str) -> list[Any]:
    return trace(name)["published"][: SEEN_UP_TO.get(name)]


def select_as_scenario(name: str, view: Any) -> None:
    if name == "regenerate-and-edit":
        view.branch(view.messages[0].codec_message_id).select(0)


def state(session: Any) -> Any:
    """All that can be told from a session."""
    return [
        (run.run_id, run.status, run.error, run.client_id, run.invocation_id, run.steps) for run in session.tree.runs
    ]


def test_the_traces_are_all_there() -> None:
    assert len(TRACES) == 19


@pytest.mark.parametrize("first_append_as_update", [False, True])
@pytest.mark.parametrize("name", TRACES)
async def test_a_client_that_was_there_shows_the_view_of_the_trace(name: str, first_append_as_update: bool) -> None:
    recorded = trace(name)
    channel = LogChannel(first_append_as_update=first_append_as_update)
    errors: list[Any] = []
    async with client(channel, codec_of(name)) as session:
        session.on_error(errors.append)
        for operation in operations(name):
            replay(channel, operation)
            await settled()
        select_as_scenario(name, session.view)
        if "clientView" in recorded:
            assert golden(session.view) == recorded["clientView"]
        if "steps" in recorded:
            assert steps(session.view.runs[-1]) == recorded["steps"]
        assert [one.ids["error_code"] for one in errors] == ([104008, 104008, 42910] if name == "run-error" else [])


@pytest.mark.parametrize("page", [1, 3, 100])
@pytest.mark.parametrize("name", TRACES)
async def test_history_alone_gives_the_view_of_the_trace(name: str, page: int) -> None:
    recorded = trace(name)
    channel = LogChannel()
    for operation in operations(name):
        replay(channel, operation)
    async with client(channel, codec_of(name), history_page=page) as session:
        assert session.view.messages == []
        await session.view.load_older(1_000)
        assert not session.view.has_older
        select_as_scenario(name, session.view)
        if "clientView" in recorded:
            assert golden(session.view) == recorded[LATE_VIEW.get(name, "clientView")]
        if "steps" in recorded:
            assert steps(session.view.runs[-1]) == recorded["steps"]


@pytest.mark.parametrize("page", [2, 100])
@pytest.mark.parametrize("paging", ["at once", "at the end"])
@pytest.mark.parametrize("name", [name for name in TRACES if name not in LATE_VIEW])
async def test_whoever_joins_at_any_moment_ends_with_the_same(name: str, paging: str, page: int) -> None:
    script = operations(name)
    whole = LogChannel()
    async with client(whole, codec_of(name)) as first:
        for operation in script:
            replay(whole, operation)
        await settled()
        select_as_scenario(name, first.view)
        expected, runs = golden(first.view), state(first)
    for joined in range(len(script) + 1):
        channel = LogChannel()
        for operation in script[:joined]:
            replay(channel, operation)
        async with client(channel, codec_of(name), history_page=page) as late:
            if paging == "at once":
                await late.view.load_older(1_000)
            for operation in script[joined:]:
                replay(channel, operation)
                await settled()
            await late.view.load_older(1_000)
            if late.view.messages:
                select_as_scenario(name, late.view)
            assert golden(late.view) == expected, f"joined at {joined}"
            assert state(late) == runs, f"joined at {joined}"
