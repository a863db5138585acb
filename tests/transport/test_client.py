"""The client's session and its handles: sending, cancelling, steering, errors, and the end of it."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from stepwell.errors import (
    ChannelBusyError,
    ChannelError,
    ChannelNotReadyError,
    InsufficientCapabilityError,
    MisuseError,
    SendError,
    SessionClosedError,
    StreamError,
    SubscriptionError,
)
from stepwell.testing import FakeClock
from stepwell.transport import ClientRun, ClientSession, Invocation, SteerOutcome
from stepwell.transport.codecs import UIMessageCodec
from stepwell.wire import transport_headers
from transport_kit import Agent, BrokenChannel, LogChannel, client, settled, shown

pytestmark = pytest.mark.anyio

CODEC = UIMessageCodec()


def said(text: str) -> Any:
    return CODEC.create_user_message({"id": f"u-{text}", "role": "user", "parts": [{"type": "text", "text": text}]})


def headers(channel: LogChannel, place: int = -1) -> dict[str, str]:
    return dict(transport_headers(channel.log[place].extras))


# --- sending ----------------------------------------------------------------------------------------------------------


async def test_an_input_is_shown_at_once_and_its_echo_takes_its_place() -> None:
    channel = LogChannel()
    clock = FakeClock()
    async with client(channel, client_id="ana", clock=clock) as session:
        channel.failures = [ChannelBusyError("later")]
        async with anyio.create_task_group() as group:
            group.start_soon(session.view.send, said("Hi"))
            await settled()
            assert (shown(session.view), len(channel.log)) == (["user:Hi"], 0)
            await clock.advance(0.1)
        assert (shown(session.view), len(channel.log)) == (["user:Hi"], 1)
        assert [node.serial for node in session.tree.visible(lambda group: group[-1])] == [channel.log[0].serial]
        assert channel.log[0].client_id == "ana"


async def test_the_headers_of_an_input_are_those_of_the_protocol() -> None:
    channel = LogChannel()
    async with client(channel, client_id="ana") as session:
        first = await session.view.send(said("one"))
        assert headers(channel) == {
            "role": "user",
            "codec-message-id": first.input_codec_message_id,
            "event-id": first.input_event_id,
            "run-client-id": "ana",
            "stream": "false",
            "discrete": "true",
        }
        await settled()
        await session.view.send(said("two"))
        assert headers(channel)["parent"] == first.input_codec_message_id
        await session.view.send(said("three"), parent="elsewhere")
        assert headers(channel)["parent"] == "elsewhere"
        await session.view.send(said("four"), run_id="R", role="assistant", supersedes="S")
        assert {key: headers(channel)[key] for key in ("run-id", "supersedes")} == {"run-id": "R", "supersedes": "S"}
    async with client(channel) as nobody:
        await nobody.view.send(said("five"))
        assert "run-client-id" not in headers(channel)


async def test_a_message_of_several_parts_is_one_publish() -> None:
    channel = LogChannel()
    parts = [
        {"type": "text", "text": "look"},
        {"type": "file", "mediaType": "image/png", "url": "https://x.test/a.png"},
    ]
    async with client(channel) as session:
        await session.view.send(CODEC.create_user_message({"id": "u", "role": "user", "parts": parts}))
        assert [len(batch) for batch in channel.published] == [2]
        await settled()
        assert [part["type"] for part in session.view.messages[0].message["parts"]] == ["text", "file"]


async def test_several_inputs_are_published_in_order_and_the_last_is_answered() -> None:
    agent = Agent(channel := LogChannel())
    async with client(channel) as session:
        agent.ask("U1", "Q1")
        agent.run("start", parent="U1")
        agent.say("hi")
        await settled()
        run = await session.view.send(
            [CODEC.create_tool_result("A1", "c1", 1), CODEC.create_tool_approval_response("A1", "c2", approved=True)],
            run_id="R",
        )
        events = [headers(channel, place)["event-id"] for place in (-2, -1)]
        assert run.input_event_id == events[1] != events[0]
        assert run.input_codec_message_id == "A1"
        assert headers(channel)["run-id"] == "R"


@pytest.mark.parametrize("inputs", [[], [said("a"), said("b")]])
async def test_no_input_and_two_new_messages_are_refused(inputs: Any) -> None:
    channel = LogChannel()
    async with client(channel) as session:
        with pytest.raises(MisuseError) as caught:
            await session.view.send(inputs)
        assert caught.value.wire_code == 40003
        assert (channel.log, shown(session.view)) == ([], [])


@pytest.mark.parametrize(
    ("failure", "raised", "code"),
    [
        (ChannelError("no"), SendError, 104005),
        (InsufficientCapabilityError("no"), InsufficientCapabilityError, 40160),
    ],
)
async def test_what_could_not_be_published_is_not_shown_any_more(failure: Exception, raised: Any, code: int) -> None:
    channel = LogChannel()
    async with client(channel) as session:
        errors: list[Any] = []
        session.on_error(errors.append)
        channel.failures = [failure]
        with pytest.raises(raised) as caught:
            await session.view.send(said("Hi"))
        assert caught.value.wire_code == code
        assert shown(session.view) == []
        assert errors == []  # told once, to the caller


async def test_a_busy_channel_is_tried_four_times_under_the_same_ids() -> None:
    channel = LogChannel()
    clock = FakeClock(auto_advance=True)
    async with client(channel, clock=clock) as session:
        channel.failures = [ChannelBusyError("busy") for _ in range(4)]
        with pytest.raises(SendError):
            await session.view.send(said("Hi"))
        assert clock.slept == [0.1, 0.2, 0.4]
        assert len({batch[0].idempotency_id for batch in channel.published}) == 1
        assert shown(session.view) == []


async def test_a_lost_acknowledgement_never_doubles_an_input() -> None:
    channel = LogChannel()
    channel.after_failure_stored = True
    async with client(channel, clock=FakeClock(auto_advance=True)) as session:
        channel.failures = [ChannelBusyError("lost"), ChannelBusyError("lost")]
        await session.view.send(said("Hi"))
        await settled()
        assert len(channel.log) == 1
        assert shown(session.view) == ["user:Hi"]


async def test_an_input_that_came_back_was_published_whatever_the_channel_said() -> None:
    channel = LogChannel()
    channel.after_failure_stored = True
    async with client(channel, clock=FakeClock(auto_advance=True)) as session:
        channel.failures = [ChannelBusyError("lost") for _ in range(4)]
        run = await session.view.send(said("Hi"))
        assert shown(session.view) == ["user:Hi"]
        assert run.input_event_id == headers(channel)["event-id"]


async def test_a_send_that_is_cancelled_is_shown_only_if_it_is_on_the_channel() -> None:
    channel = LogChannel()
    async with client(channel, clock=FakeClock()) as session:
        channel.failures = [ChannelBusyError("busy")]
        async with anyio.create_task_group() as group:
            group.start_soon(session.view.send, said("Hi"))
            await settled()
            assert shown(session.view) == ["user:Hi"]
            group.cancel_scope.cancel()
        assert shown(session.view) == []


# --- edit and regenerate ----------------------------------------------------------------------------------------------


async def test_the_own_edit_is_shown_at_once_and_everybody_else_stays() -> None:
    agent = Agent(channel := LogChannel())
    clock = FakeClock()
    async with client(channel, clock=clock) as session, client(channel) as somebody:
        agent.ask("U1", "Q1")
        agent.run("start", parent="U1")
        agent.say("A1")
        await settled()
        channel.failures = [ChannelBusyError("busy")]
        async with anyio.create_task_group() as group:
            group.start_soon(session.view.edit, "U1", said("Q1 again"))
            await settled()
            assert shown(session.view) == ["user:Q1 again"]
            await clock.advance(0.1)
        await settled()
        assert {key: headers(channel).get(key) for key in ("fork-of", "parent")} == {"fork-of": "U1", "parent": None}
        assert shown(session.view) == ["user:Q1 again"]
        assert shown(somebody.view) == ["user:Q1", "assistant:A1"]


async def test_an_edit_that_fails_leaves_the_branch_as_it_was() -> None:
    agent = Agent(channel := LogChannel())
    async with client(channel) as session:
        agent.ask("U1", "one")
        agent.ask("U2", "two", fork_of="U1")
        await settled()
        session.view.branch("U1").select(0)
        channel.failures = [ChannelError("no")]
        with pytest.raises(SendError):
            await session.view.edit("U1", said("three"))
        assert shown(session.view) == ["user:one"]
        assert session.view.branch("U1").index == 0


async def test_an_edit_of_a_later_input_keeps_its_parent() -> None:
    agent = Agent(channel := LogChannel())
    async with client(channel) as session:
        agent.ask("U1", "Q1")
        agent.run("start", parent="U1")
        agent.say("A1")
        agent.ask("U2", "Q2", parent="A1")
        await settled()
        await session.view.edit("U2", said("Q2 again"))
        assert {key: headers(channel)[key] for key in ("fork-of", "parent")} == {"fork-of": "U2", "parent": "A1"}
        await settled()
        assert shown(session.view) == ["user:Q1", "assistant:A1", "user:Q2 again"]


async def test_regenerating_follows_the_new_answer_also_where_an_old_one_was_selected() -> None:
    agent = Agent(channel := LogChannel())
    async with client(channel) as session:
        agent.ask("U1", "Q1")
        for number in (1, 2):
            agent.run("start", f"R{number}", parent="U1")
            agent.say(f"A{number}", f"A{number}", run=f"R{number}")
        await settled()
        session.view.branch("A2").select(0)
        run = await session.view.regenerate("A1")
        assert headers(channel)["msg-regenerate"] == "A1"
        assert headers(channel)["parent"] == "U1"
        assert headers(channel)["codec-message-id"] == run.input_codec_message_id != "A1"
        agent.run("start", "R3", parent="U1", msg_regenerate="A1", input_codec_message_id=run.input_codec_message_id)
        agent.say("A3", "A3", run="R3")
        await run.started
        await settled()
        assert run.run_id == "R3"
        assert shown(session.view) == ["user:Q1", "assistant:A3"]
        # Once more, of what was made anew: one more alternative of the first answer.
        await session.view.regenerate("A3")
        assert headers(channel)["msg-regenerate"] == "A1"


async def test_an_answer_that_was_made_anew_is_made_anew_as_the_first_one() -> None:
    agent = Agent(channel := LogChannel())
    async with client(channel) as session:
        agent.ask("U1", "Q1")
        agent.run("start", "R1", parent="U1")
        agent.say("A1", "A1", run="R1")
        agent.run("start", "R2", parent="U1", msg_regenerate="A1")
        agent.say("B1", "B1", run="R2")
        agent.say("B2", "B2", run="R2")
        await settled()
        await session.view.regenerate("B1")
        assert (headers(channel)["msg-regenerate"], headers(channel)["parent"]) == ("A1", "U1")
        await session.view.regenerate("B2")
        assert (headers(channel)["msg-regenerate"], headers(channel)["parent"]) == ("B2", "B1")


async def test_only_inputs_are_edited_and_only_answers_made_anew() -> None:
    agent = Agent(channel := LogChannel())
    async with client(channel) as session:
        agent.ask("U1", "Q1")
        agent.run("start", "R1", parent="U1")
        agent.say("A1", "A1", run="R1")
        agent.run("start", "R0")
        agent.say("A0", "A0", run="R0")
        await settled()
        said_so_far = len(channel.log)
        for call in (
            session.view.edit("nope", said("x")),
            session.view.edit("A1", said("x")),
            session.view.regenerate("nope"),
            session.view.regenerate("U1"),
            session.view.regenerate("A0"),
        ):
            with pytest.raises(MisuseError):
                await call
        assert len(channel.log) == said_so_far


# --- handles ----------------------------------------------------------------------------------------------------------


async def test_a_handle_follows_its_run() -> None:
    agent = Agent(channel := LogChannel())
    async with client(channel) as session:
        run = await session.view.send(said("Q1"))
        assert (run.run_id, run.status, run.error, run.started.done) == ("", "active", None, False)
        assert [one.message["role"] for one in run.messages] == ["user"]
        assert run.to_invocation() == Invocation(input_event_id=run.input_event_id, session_name=channel.name)
        asked = run.input_codec_message_id
        agent.run("start", "R1", parent=asked, input_codec_message_id=asked)
        await run.started
        assert run.run_id == "R1"
        agent.say("A1", "A1", run="R1")
        agent.run("end", "R1", run_reason="error", error_code="1", error_message="no")
        await settled()
        assert run.status == "error"
        assert run.error is not None
        assert run.error.code == 1
        assert [one.codec_message_id for one in run.messages] == [asked, "A1"]
        await run.started  # may be awaited again


async def test_a_continuation_is_started_by_the_resumption_and_spans_the_whole_run() -> None:
    agent = Agent(channel := LogChannel())
    async with client(channel) as session:
        agent.ask("U1", "Q1")
        agent.run("start", "R1", parent="U1", invocation_id="I1", input_codec_message_id="U1")
        agent.say("A1", "A1", run="R1")
        agent.run("suspend", "R1", invocation_id="I1")
        await settled()
        run = await session.view.send(CODEC.create_tool_approval_response("A1", "c1", approved=True), run_id="R1")
        assert not run.started.done
        agent.run("resume", "R1", invocation_id="I2", input_codec_message_id="A1")
        await run.started
        await settled()
        assert (run.run_id, run.status) == ("R1", "active")
        assert [one.codec_message_id for one in run.messages] == ["U1", "A1"]
        await run.cancel()
        assert {key: headers(channel)[key] for key in ("run-id", "input-codec-message-id")} == {
            "run-id": "R1",
            "input-codec-message-id": "A1",
        }


async def test_cancels_name_the_input_or_the_run() -> None:
    channel = LogChannel()
    async with client(channel, client_id="ana") as session:
        run = await session.view.send(said("Q1"))
        await run.cancel()
        assert channel.log[-1].name == "ai-cancel"
        assert channel.log[-1].client_id == "ana"
        assert headers(channel).keys() == {"event-id", "input-codec-message-id"}
        assert headers(channel)["input-codec-message-id"] == run.input_codec_message_id
        await session.cancel("R1")
        assert headers(channel).keys() == {"event-id", "run-id"}
        assert headers(channel)["run-id"] == "R1"


# --- steering ---------------------------------------------------------------------------------------------------------


async def begun(channel: LogChannel, session: ClientSession[Any, Any]) -> ClientRun[Any, Any]:
    run = await session.view.send(said("Q1"))
    asked = run.input_codec_message_id
    Agent(channel).run("start", "R1", parent=asked, input_codec_message_id=asked)
    await run.started
    return run


async def test_a_steer_waits_for_its_run_to_start_and_has_no_parent() -> None:
    agent = Agent(channel := LogChannel())
    async with client(channel, client_id="ana") as session:
        run = await session.view.send(said("Q1"))
        steer = run.steer(said("faster"))
        await settled()
        assert not steer.published.done
        asked = run.input_codec_message_id
        agent.run("start", "R1", parent=asked, input_codec_message_id=asked)
        assert await steer.published == channel.log[-1].serial
        found = headers(channel)
        assert (found["run-id"], found["role"], found["run-client-id"], "parent" in found) == (
            "R1",
            "user",
            "ana",
            False,
        )
        await settled()
        assert shown(session.view) == ["user:Q1", "user:faster"]


async def test_a_steer_that_was_answered_is_consumed_at_the_suspension_or_the_end_and_another_at_the_end() -> None:
    agent = Agent(channel := LogChannel())
    async with client(channel) as session:
        run = await begun(channel, session)
        one, two, three = run.steer(said("one")), run.steer(said("two")), run.steer(said("three"))
        await settled()
        ids = [headers(channel, place)["codec-message-id"] for place in (-3, -2, -1)]
        agent.say("a", run="R1", steers=f'["{ids[0]}"]')
        agent.run("suspend", "R1")
        assert await one.outcome == SteerOutcome(consumed=True, run_terminal_reason=None)
        assert not two.outcome.done
        agent.run("resume", "R1")
        agent.say("b", "A2", run="R1", steers=f'["{ids[1]}"]')
        agent.run("end", "R1", run_reason="cancelled")
        assert await two.outcome == SteerOutcome(consumed=True, run_terminal_reason="cancelled")
        assert await three.outcome == SteerOutcome(consumed=False, run_terminal_reason="cancelled")


async def test_a_run_that_has_ended_is_not_steered() -> None:
    agent = Agent(channel := LogChannel())
    async with client(channel) as session:
        run = await begun(channel, session)
        agent.run("end", "R1", run_reason="complete")
        await settled()
        steer = run.steer(said("too late"))
        for waiting in (steer.published, steer.outcome):
            with pytest.raises(MisuseError) as caught:
                await waiting
            assert caught.value.wire_code == 40003


async def test_a_steer_that_cannot_be_published_says_so_twice() -> None:
    channel = LogChannel()
    async with client(channel) as session:
        run = await begun(channel, session)
        channel.failures = [ChannelError("no")]
        steer = run.steer(said("lost"))
        for waiting in (steer.published, steer.outcome):
            with pytest.raises(SendError):
                await waiting
        broken = run.steer({"no": "input"})
        with pytest.raises(Exception):  # noqa: B017 - whatever the codec makes of it
            await broken.published


async def test_leaving_ends_every_wait() -> None:
    channel = LogChannel()
    async with client(channel) as session:
        first = await begun(channel, session)
        published = first.steer(said("one"))
        await settled()
        second = await session.view.send(said("Q2"))
        waiting = second.steer(said("two"))
        await settled()
    assert await published.published
    for latch in (published.outcome, second.started, waiting.published, waiting.outcome):
        with pytest.raises(SessionClosedError):
            await latch


async def test_waits_are_over_when_a_gap_hid_what_they_wait_for() -> None:
    agent = Agent(channel := LogChannel())
    async with client(channel) as session:
        first = await begun(channel, session)
        steer = first.steer(said("one"))
        await settled()
        second = await session.view.send(said("Q2"))
        channel.subscriptions[0].paused = True
        await settled()
        agent.run("end", "R1", run_reason="complete")
        asked = second.input_codec_message_id
        agent.run("start", "R2", parent=asked, input_codec_message_id=asked)
        channel.lose()
        channel.subscriptions[0].paused = False
        channel.wake()
        await second.started
        assert second.run_id == "R2"
        assert await steer.outcome == SteerOutcome(consumed=False, run_terminal_reason="complete")


# --- errors and life --------------------------------------------------------------------------------------------------


async def test_a_message_that_cannot_be_handled_is_reported_and_reading_goes_on() -> None:
    agent = Agent(channel := LogChannel())
    async with client(channel) as session:
        errors: list[Any] = []
        stop = session.on_error(errors.append)
        agent.ask("U1", "Q1")
        channel.say("ai-output", {"run-id": ["no", "text"], "stream": "false"}, "x", {"kind": "file"})
        agent.ask("U2", "Q2", parent="U1")
        await settled()
        assert shown(session.view) == ["user:Q1", "user:Q2"]
        assert [type(one) for one in errors] == [SubscriptionError]
        assert errors[0].wire_code == 104001
        stop()
        stop()


async def test_a_listener_that_raises_is_logged_and_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    agent = Agent(channel := LogChannel())
    async with client(channel) as session:

        def raising(error: Any) -> None:
            raise RuntimeError("listener")

        session.on_error(raising)
        agent.run("start")
        agent.run("end", run_reason="error")
        agent.ask("U1", "Q1")
        await settled()
        assert shown(session.view) == ["user:Q1"]
    assert "on_error" in caplog.text


async def test_a_run_that_ends_in_error_is_told_to_every_session_once_and_not_from_history() -> None:
    agent = Agent(channel := LogChannel())
    told: list[Any] = []
    async with client(channel) as session, client(channel) as other:
        session.on_error(told.append)
        other.on_error(told.append)
        agent.run("start", "R1")
        agent.run("end", "R1", run_reason="error", error_code="104008", error_message="quota")
        await settled()
        assert [(type(one), one.ids["run_id"], one.ids["error_code"]) for one in told] == [
            (StreamError, "R1", 104008)
        ] * 2
        assert told[0].message == "quota"
        channel.lose()
        await settled()
        async with client(channel) as late:
            late.on_error(told.append)
            await late.view.load_older(10)
        assert len(told) == 2


async def test_a_channel_that_cannot_be_subscribed_to_is_said_on_entering() -> None:
    session = client(BrokenChannel())
    for _ in range(2):
        with pytest.raises(SubscriptionError) as caught:
            async with session:
                raise AssertionError
        assert caught.value.wire_code == 104001


async def test_a_channel_that_fails_later_is_reported_and_nothing_is_sent_any_more() -> None:
    channel = LogChannel()
    errors: list[Any] = []
    async with client(channel) as session:
        session.on_error(errors.append)
        run = await session.view.send(said("Q1"))
        await settled()

        async def failing(limit: int = 256) -> Any:
            raise ChannelError("gone for good")

        channel.subscriptions[0].read = failing  # type: ignore[method-assign]
        Agent(channel).ask("U2", "Q2")
        with pytest.raises(SubscriptionError):
            await run.started
        assert [type(one) for one in errors] == [SubscriptionError]
        with pytest.raises(ChannelNotReadyError):
            await session.view.send(said("Q2"))


async def test_nothing_works_before_entering_and_after_leaving() -> None:
    channel = LogChannel()
    session = client(channel)
    view = session.view
    calls: list[Any] = [
        lambda: view.send(said("x")),
        lambda: session.cancel("R"),
        lambda: view.load_older(),
        lambda: session.wait_for_input("e"),
    ]
    for call in calls:
        with pytest.raises(ChannelNotReadyError) as caught:
            await call()
        assert caught.value.wire_code == 104007
    async with session:
        with pytest.raises(MisuseError):
            await session.__aenter__()
        run = await view.send(said("x"))
        await settled()
    for call in [*calls, run.cancel]:
        with pytest.raises(SessionClosedError) as closed:
            await call()
        assert closed.value.wire_code == 104004
    with pytest.raises(SessionClosedError):
        run.steer(said("x"))
    with pytest.raises(SessionClosedError):
        await session.__aenter__()
    assert shown(view) == ["user:x"]  # what was read can still be looked at


async def test_what_the_body_raises_comes_out_as_it_is() -> None:
    with pytest.raises(KeyError):
        async with client(LogChannel()):
            raise KeyError("mine")


async def test_cancelling_the_body_leaves_cleanly() -> None:
    session = client(LogChannel())
    with anyio.CancelScope() as scope:
        async with session:
            scope.cancel()
            await anyio.sleep_forever()
    assert scope.cancelled_caught
    assert session.closed


async def test_a_page_of_history_has_bounds() -> None:
    for size in (0, 1_001):
        with pytest.raises(MisuseError):
            client(LogChannel(), history_page=size)


async def test_an_input_is_waited_for_where_it_is_known_in_history_and_where_it_comes() -> None:
    agent = Agent(channel := LogChannel())
    agent.ask("U1", "Q1")
    agent.ask("U2", "Q2")
    async with client(channel, history_page=1) as session:
        assert (await session.wait_for_input("e-U1")).data == "Q1"
        assert (await session.wait_for_input("e-U1")).data == "Q1"
        found: list[Any] = []

        async def wait(event_id: str) -> None:
            found.append((await session.wait_for_input(event_id)).data)

        async with anyio.create_task_group() as group:
            group.start_soon(wait, "e-U3")
            group.start_soon(wait, "e-U3")
            await settled()
            assert found == []
            agent.ask("U3", "Q3")
            await settled()
            assert found == ["Q3", "Q3"]
        async with anyio.create_task_group() as group:
            group.start_soon(wait, "e-U4")
            await settled()
            group.cancel_scope.cancel()


async def test_an_input_that_came_in_a_gap_is_found() -> None:
    agent = Agent(channel := LogChannel())
    found: list[Any] = []
    async with client(channel) as session, anyio.create_task_group() as group:

        async def wait() -> None:
            found.append((await session.wait_for_input("e-U1")).data)

        group.start_soon(wait)
        await settled()
        channel.subscriptions[0].paused = True
        await settled()
        agent.ask("U1", "Q1")
        channel.lose()
        channel.subscriptions[0].paused = False
        channel.wake()
        await settled()
        assert found == ["Q1"]


async def test_a_page_under_way_when_the_session_is_left_is_dropped() -> None:
    agent = Agent(channel := LogChannel())
    agent.ask("U1", "Q1")
    history, gate = channel.history, anyio.Event()

    async def slow(**options: Any) -> Any:
        await gate.wait()
        return await history(**options)

    channel.history = slow  # type: ignore[method-assign]
    async with anyio.create_task_group() as group:
        async with client(channel) as session:
            group.start_soon(session.view.load_older)
            await settled()
        gate.set()
    assert shown(session.view) == []


async def test_after_a_reload_no_answered_request_is_open() -> None:
    agent = Agent(channel := LogChannel())
    async with client(channel) as session:
        agent.ask("U1", "Pay Bob")
        agent.run("start", "R1", parent="U1", invocation_id="I1", input_codec_message_id="U1")
        for name in ("c1", "c2", "c3"):
            agent.output("tool-input", {}, run="R1", codec={"toolCallId": name, "toolName": "pay"})
        agent.output("tool-approval-request", "", run="R1", codec={"toolCallId": "c1", "approvalId": "p1"})
        agent.output("tool-approval-request", "", run="R1", codec={"toolCallId": "c2", "approvalId": "p2"})
        agent.run("suspend", "R1", invocation_id="I1")
        await settled()
        await session.view.send(CODEC.create_tool_approval_response("A1", "c1", approved=True), run_id="R1")
        await session.view.send(
            CODEC.create_tool_approval_response("A1", "c2", approved=False, reason="too much"), run_id="R1"
        )
        await session.view.send(CODEC.create_tool_result("A1", "c3", {"city": "Rome"}), run_id="R1")
        await settled()
        answered = ["approval-responded", "output-denied", "output-available"]

        def states(one: Any) -> list[str]:
            return [part["state"] for part in one.view.messages[1].message["parts"] if part["type"].startswith("tool-")]

        assert states(session) == answered
        for page in (1, 2, 100):
            async with client(channel, history_page=page) as reloaded:
                await reloaded.view.load_older(10)
                assert states(reloaded) == answered
