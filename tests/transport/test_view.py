"""Views: what they show, how they page, which branch they are on, and what they tell of changes."""

from __future__ import annotations

from typing import Any

import anyio
import pytest

from stepwell.errors import ChannelError, HistoryFetchError, MisuseError, SessionClosedError
from stepwell.testing import FakeClock
from stepwell.transport import ClientSession
from stepwell.transport.codecs import UIMessageCodec
from transport_kit import Agent, LogChannel, client, settled, shown

pytestmark = pytest.mark.anyio


def turn(agent: Agent, number: int, **headers: str) -> None:
    """One question and its answer: messages `U<n>` and `A<n>`."""
    agent.ask(f"U{number}", f"Q{number}", **headers)
    agent.run("start", f"R{number}", parent=f"U{number}", input_codec_message_id=f"U{number}")
    agent.say(f"A{number}", f"A{number}", run=f"R{number}")
    agent.run("end", f"R{number}", run_reason="complete")


def talk(agent: Agent, turns: int) -> list[str]:
    """A conversation, and what is shown of it."""
    for number in range(1, turns + 1):
        turn(agent, number, **({"parent": f"A{number - 1}"} if number > 1 else {}))
    return [text for n in range(1, turns + 1) for text in (f"user:Q{n}", f"assistant:A{n}")]


# --- paging -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", [1, 2, 3, 7, 100])
async def test_load_older_reveals_exactly_as_many_messages_as_asked_for(page: int) -> None:
    agent = Agent(channel := LogChannel())
    whole = talk(agent, 6)
    async with client(channel, history_page=page) as session:
        view = session.view
        assert view.has_older
        for limit in (1, 2, 1, 3):
            before = len(view.messages)
            revealed = await view.load_older(limit)
            assert len(revealed) == limit
            assert list(view.messages[:limit]) == list(revealed)
            assert shown(view) == whole[-before - limit :]
        assert len(await view.load_older(100)) == 5
        assert shown(view) == whole
        assert not view.has_older
        assert list(await view.load_older()) == []


async def test_pages_are_read_once_and_what_is_withheld_is_kept() -> None:
    agent = Agent(channel := LogChannel())
    talk(agent, 6)
    async with client(channel) as session:
        await session.view.load_older(1)
        assert channel.pages == 1
        for _ in range(11):
            assert len(await session.view.load_older(1)) == 1
        assert channel.pages == 1


async def test_what_comes_live_is_shown_below_what_is_paged() -> None:
    agent = Agent(channel := LogChannel())
    whole = talk(agent, 2)
    async with client(channel) as session:
        await session.view.load_older(1)
        turn(agent, 3, parent="A2")
        await settled()
        assert shown(session.view) == [whole[-1], "user:Q3", "assistant:A3"]
        await session.view.load_older(2)
        assert shown(session.view) == [*whole[-3:], "user:Q3", "assistant:A3"]


async def test_a_run_under_way_is_shown_before_anything_is_paged_and_completed_by_it() -> None:
    agent = Agent(channel := LogChannel())
    agent.ask("U1", "Q1")
    agent.run("start", parent="U1", input_codec_message_id="U1")
    attempt: dict[str, Any] = {"input": "U1", "parent": "U1", "step": "S", "serial": agent.step("S")}
    agent.output("start", "", **attempt)
    agent.output("start-step", "", **attempt)
    stream = agent.open(**attempt)
    agent.append(stream, "one ")
    async with client(channel) as session:
        agent.append(stream, "two")
        await settled()
        assert shown(session.view) == ["assistant:one two"]
        assert [run.status for run in session.view.runs] == ["active"]
        await session.view.load_older(10)
        assert shown(session.view) == ["user:Q1", "assistant:one two"]
        parts = session.view.messages[1].message["parts"]
        assert [part["type"] for part in parts] == ["step-start", "text"]


async def test_other_views_do_not_show_what_one_has_paged() -> None:
    agent = Agent(channel := LogChannel())
    whole = talk(agent, 3)
    async with client(channel) as session:
        other = session.create_view()
        await session.view.load_older(4)
        assert shown(session.view) == whole[-4:]
        assert shown(other) == []
        assert other.has_older
        await other.load_older(1)
        assert shown(other) == whole[-1:]
        assert channel.pages == 1


async def test_what_a_page_adds_in_front_of_a_run_that_is_shown_is_older_in_every_view() -> None:
    agent = Agent(channel := LogChannel())
    agent.ask("U1", "Q1")
    agent.run("start", parent="U1", input_codec_message_id="U1")
    agent.say("first", "A0")
    stream = agent.open("A1")
    async with client(channel) as session:
        other = session.create_view()
        agent.append(stream, "second")
        await settled()
        assert shown(session.view) == shown(other) == ["assistant:second"]
        await session.view.load_older(1)
        assert shown(session.view) == ["assistant:first", "assistant:second"]
        assert shown(other) == ["assistant:second"]
        await other.load_older(2)
        assert shown(other) == ["user:Q1", "assistant:first", "assistant:second"]


@pytest.mark.parametrize("page", [7, 100])
async def test_messages_that_others_stand_in_for_do_not_count(page: int) -> None:
    agent = Agent(channel := LogChannel())
    talk(agent, 2)
    agent.ask("U3", "Q3", parent="A2")
    agent.run("start", "R3", parent="U3")
    for name in ("X1", "X2", "X3", "X4"):
        agent.say(name, name, run="R3")
    agent.run("start", "R4", parent="X1", msg_regenerate="X2")
    agent.say("Y2", "Y2", run="R4")
    whole = ["user:Q1", "assistant:A1", "user:Q2", "assistant:A2", "user:Q3", "assistant:X1", "assistant:Y2"]
    async with client(channel, history_page=page) as session:
        assert len(await session.view.load_older(4)) == 4
        assert shown(session.view) == whole[-4:]
        assert len(await session.view.load_older(10)) == 3
        assert shown(session.view) == whole


async def test_two_callers_of_load_older_get_their_own_messages() -> None:
    agent = Agent(channel := LogChannel())
    whole = talk(agent, 3)
    async with client(channel, history_page=1) as session, anyio.create_task_group() as group:
        group.start_soon(session.view.load_older, 2)
        group.start_soon(session.view.load_older, 3)
        await settled()
        assert shown(session.view) == whole[-5:]


async def test_a_page_that_was_cancelled_is_read_again() -> None:
    agent = Agent(channel := LogChannel())
    whole = talk(agent, 2)
    async with client(channel) as session:
        with anyio.CancelScope() as scope:
            scope.cancel()
            await session.view.load_older(2)
        assert shown(session.view) == []
        await session.view.load_older(2)
        assert shown(session.view) == whole[-2:]


async def test_a_page_is_tried_four_times_and_the_place_is_kept() -> None:
    agent = Agent(channel := LogChannel())
    whole = talk(agent, 2)
    clock = FakeClock(auto_advance=True)
    async with client(channel, clock=clock, history_page=3) as session:
        await session.view.load_older(1)
        channel.history_failures = [ChannelError("gone") for _ in range(3)]
        await session.view.load_older(1)
        assert clock.slept == [0.1, 0.2, 0.4]
        channel.history_failures = [ChannelError("gone") for _ in range(4)]
        with pytest.raises(HistoryFetchError):
            await session.view.load_older(10)
        await session.view.load_older(10)
        assert shown(session.view) == whole


async def test_load_older_refuses_a_limit_that_is_none() -> None:
    async with client(LogChannel()) as session:
        with pytest.raises(MisuseError):
            await session.view.load_older(0)


@pytest.mark.parametrize(("seam", "expected"), [("A2", 2), ("U1", 5), ("A3", 0), ("nowhere", 6)])
async def test_load_until_stops_at_a_known_message_and_hides_it_and_what_is_older(seam: str, expected: int) -> None:
    agent = Agent(channel := LogChannel())
    whole = talk(agent, 3)
    async with client(channel, history_page=2) as session:
        found = await session.view.load_until(lambda one: one.codec_message_id == seam)
        assert list(found) == list(session.view.messages)
        assert shown(session.view) == whole[6 - expected :]
        assert session.view.has_older == (seam != "nowhere")
        await session.view.load_older(100)
        assert shown(session.view) == whole


# --- branches ---------------------------------------------------------------------------------------------------------


async def test_a_message_without_alternatives_is_its_only_one() -> None:
    agent = Agent(channel := LogChannel())
    async with client(channel) as session:
        talk(agent, 1)
        await settled()
        branch = session.view.branch("A1")
        assert (branch.has_siblings, branch.index, len(branch.siblings)) == (False, 0, 1)
        assert branch.selected is not None
        branch.select(3)
        unknown = session.view.branch("nobody")
        assert (unknown.has_siblings, unknown.index, unknown.siblings, unknown.selected) == (False, 0, [], None)


async def test_answers_made_anew_roll_forward_unless_one_was_selected() -> None:
    agent = Agent(channel := LogChannel())
    async with client(channel) as session:
        view, other = session.view, session.create_view()
        talk(agent, 1)
        for number in (2, 3):
            agent.run("start", f"R{number}", parent="U1", msg_regenerate="A1", input_codec_message_id=f"C{number}")
            agent.say(f"A{number}", f"A{number}", run=f"R{number}")
            await settled()
            assert shown(view) == ["user:Q1", f"assistant:A{number}"]
        branch = view.branch("A3")
        assert (branch.index, len(branch.siblings), branch.has_siblings) == (2, 3, True)
        branch.select(-5)
        assert shown(view) == ["user:Q1", "assistant:A1"]
        assert shown(other) == ["user:Q1", "assistant:A3"]
        agent.run("start", "R4", parent="U1", msg_regenerate="A1")
        agent.say("A4", "A4", run="R4")
        await settled()
        assert shown(view) == ["user:Q1", "assistant:A1"]
        assert shown(other) == ["user:Q1", "assistant:A4"]
        assert view.branch("A1").index == 0
        run = view.run_of("U1")
        assert run is not None
        assert run.run_id == "R1"
        view.branch("A1").select(99)
        assert shown(view) == ["user:Q1", "assistant:A4"]


async def test_a_view_stays_with_the_input_it_shows_when_somebody_replaces_it() -> None:
    agent = Agent(channel := LogChannel())
    async with client(channel) as session:
        talk(agent, 2)
        await settled()
        turn(agent, 3, fork_of="U1")
        await settled()
        late = session.create_view()
        assert shown(session.view) == ["user:Q1", "assistant:A1", "user:Q2", "assistant:A2"]
        assert shown(late) == ["user:Q3", "assistant:A3"]
        branch = session.view.branch("U1")
        assert (branch.index, len(branch.siblings)) == (0, 2)
        branch.select(1)
        assert shown(session.view) == ["user:Q3", "assistant:A3"]
        turn(agent, 4, fork_of="U3")
        await settled()
        assert shown(session.view) == ["user:Q3", "assistant:A3"]
        assert session.view.branch("U3").index == 1


async def test_regenerating_a_later_message_of_a_run_replaces_it_and_what_follows() -> None:
    agent = Agent(channel := LogChannel())
    async with client(channel) as session:
        agent.ask("U1", "Q1")
        agent.run("start", "R1", parent="U1")
        for name in ("A1", "A2", "A3"):
            agent.say(name, name, run="R1")
        agent.run("start", "R2", parent="A1", msg_regenerate="A2")
        stream = agent.open("B2", "R2")
        agent.append(stream, "B2")
        await settled()
        assert shown(session.view) == ["user:Q1", "assistant:A1", "assistant:B2"]
        agent.append(stream, " more")
        await settled()
        assert shown(session.view) == ["user:Q1", "assistant:A1", "assistant:B2 more"]
        branch = session.view.branch("B2")
        assert (branch.index, [one["parts"][-1]["text"] for one in branch.siblings]) == (1, ["A2", "B2 more"])
        branch.select(0)
        assert shown(session.view) == ["user:Q1", "assistant:A1", "assistant:A2", "assistant:A3"]
        agent.append(stream, " unseen")
        agent.run("start", "R3", parent="A1", msg_regenerate="A2")
        agent.say("C2", "C2", run="R3")
        await settled()
        assert shown(session.view) == ["user:Q1", "assistant:A1", "assistant:A2", "assistant:A3"]
        session.view.branch("A2").select(2)
        assert shown(session.view) == ["user:Q1", "assistant:A1", "assistant:C2"]


async def test_a_selection_among_tool_results_survives_the_agent_taking_one_up() -> None:
    agent = Agent(channel := LogChannel())
    async with client(channel) as session:
        agent.ask("U1", "Q1")
        agent.run("start", "R1", parent="U1")
        for name in ("F1", "F2"):
            agent.ask(name, name, role="assistant", parent="U1", supersedes="R1")
        await settled()
        # A user message in the role of an assistant stands for the result of a tool here.
        assert [one.codec_message_id for one in session.view.messages] == ["U1", "F2"]
        session.view.branch("F2").select(0)
        assert [one.codec_message_id for one in session.view.messages] == ["U1", "F1"]
        agent.run("start", "R2", parent="U1", input_codec_message_id="F1")
        agent.say("answer", "A2", run="R2")
        await settled()
        assert [one.codec_message_id for one in session.view.messages] == ["U1", "F1", "A2"]
        assert [run.run_id for run in session.view.runs] == ["R2"]


async def test_selecting_an_older_branch_shows_it_whole() -> None:
    agent = Agent(channel := LogChannel())
    talk(agent, 2)
    turn(agent, 3, fork_of="U1")
    async with client(channel) as session:
        await session.view.load_older(2)
        assert shown(session.view) == ["user:Q3", "assistant:A3"]
        session.view.branch("U3").select(0)
        assert shown(session.view) == ["user:Q1", "assistant:A1", "user:Q2", "assistant:A2"]


async def test_an_alternative_of_a_run_that_is_shown_in_part_is_shown_whole() -> None:
    agent = Agent(channel := LogChannel())
    agent.ask("U1", "Q1")
    for run in ("R1", "R2"):
        agent.run("start", run, parent="U1")
        for number in (1, 2, 3):
            agent.say(f"{run}-{number}", f"{run}-{number}", run=run)
    async with client(channel) as session:
        await session.view.load_older(1)
        assert shown(session.view) == ["assistant:R2-3"]
        session.view.branch("R2-1").select(0)
        assert shown(session.view) == ["assistant:R1-1", "assistant:R1-2", "assistant:R1-3"]


async def test_a_fork_that_is_withheld_stays_so_when_an_agent_takes_it_up() -> None:
    agent = Agent(channel := LogChannel())
    agent.ask("U1", "Q1")
    agent.run("start", "R1", parent="U1")
    agent.ask("F", "result", role="assistant", parent="U1", supersedes="R1")
    agent.ask("U2", "Q2", parent="F")
    async with client(channel) as session:
        await session.view.load_older(1)
        agent.run("start", "R2", parent="U1", input_codec_message_id="F")
        await settled()
        assert shown(session.view) == ["user:Q2"]
        assert len(await session.view.load_older(10)) == 2


async def test_regenerating_a_later_message_follows_the_new_one_where_another_was_selected() -> None:
    agent = Agent(channel := LogChannel())
    async with client(channel) as session:
        agent.ask("U1", "Q1")
        agent.run("start", "R1", parent="U1")
        for name in ("A1", "A2"):
            agent.say(name, name, run="R1")
        agent.run("start", "R2", parent="A1", msg_regenerate="A2")
        agent.say("B2", "B2", run="R2")
        await settled()
        session.view.branch("B2").select(0)
        assert shown(session.view)[-1] == "assistant:A2"
        await session.view.regenerate("A2")
        agent.run("start", "R3", parent="A1", msg_regenerate="A2")
        agent.say("C2", "C2", run="R3")
        await settled()
        assert shown(session.view) == ["user:Q1", "assistant:A1", "assistant:C2"]


async def test_run_of_a_message_is_its_run_and_of_an_input_the_answer() -> None:
    agent = Agent(channel := LogChannel())
    async with client(channel) as session:
        talk(agent, 1)
        agent.ask("U2", "unanswered", parent="A1")
        await settled()
        assert [session.view.run_of(name) and session.view.run_of(name).run_id for name in ("U1", "A1")] == ["R1", "R1"]  # type: ignore[union-attr]
        assert session.view.run_of("U2") is None
        assert session.view.run_of("nobody") is None
        assert session.view.run("R1") == session.tree.run("R1")
        assert session.view.run("nobody") is None


# --- changes ----------------------------------------------------------------------------------------------------------


async def test_changes_are_told_as_one_to_who_is_slow_and_hold_what_changed() -> None:
    agent = Agent(channel := LogChannel())
    async with client(channel) as session:
        changes = session.view.changes()
        agent.ask("U1", "Q1")
        agent.run("start", parent="U1")
        stream = agent.open()
        for _ in range(1_000):
            agent.append(stream, "x")
        await settled()
        change = await anext(changes)
        assert (change.keys, change.structure, change.gap) == ({"U1", "R"}, True, False)
        agent.append(stream, "y")
        agent.run("end", run_reason="complete")
        await settled()
        change = await anext(changes)
        assert (change.keys, change.structure, change.gap) == ({"R"}, False, False)
        with anyio.move_on_after(0) as scope:
            await anext(changes)
        assert scope.cancelled_caught


async def test_a_superseding_start_is_told() -> None:
    agent = Agent(channel := LogChannel())
    async with client(channel) as session:
        agent.ask("U1", "Q1")
        agent.run("start", parent="U1")
        agent.say("dead", step="S", serial=agent.step("S"), close=False)
        await settled()
        changes = session.view.changes()
        agent.step("S")
        await settled()
        assert (await anext(changes)).keys == {"R"}
        assert shown(session.view) == ["user:Q1"]


async def test_what_is_on_no_branch_of_the_view_is_not_told() -> None:
    agent = Agent(channel := LogChannel())
    async with client(channel) as session:
        talk(agent, 1)
        agent.run("start", "R2", parent="U1", msg_regenerate="A1")
        stream = agent.open("A2", "R2")
        await settled()
        session.view.branch("A2").select(0)
        changes = session.view.changes()
        agent.append(stream, "unseen")
        agent.end("S", agent.step("S", "R2"), run="R2")
        await settled()
        with anyio.move_on_after(0) as scope:
            await anext(changes)
        assert scope.cancelled_caught


async def test_iterators_end_when_the_view_or_the_session_is_closed() -> None:
    agent = Agent(channel := LogChannel())
    told: list[str] = []

    async def follow(view: Any, name: str) -> None:
        async for _ in view.changes():
            pass
        told.append(name)

    async with anyio.create_task_group() as group:
        async with client(channel) as session:
            other = session.create_view()
            group.start_soon(follow, session.view, "view")
            group.start_soon(follow, other, "other")
            agent.ask("U1", "Q1")
            await settled()
            other.close()
            await settled()
            assert told == ["other"]
            with pytest.raises(SessionClosedError):
                await other.send(UIMessageCodec().create_user_message("x"))
        await settled()
        assert told == ["other", "view"]
        async for _ in session.view.changes():
            raise AssertionError
        with pytest.raises(SessionClosedError):
            session.create_view()


async def test_messages_that_were_read_do_not_change() -> None:
    agent = Agent(channel := LogChannel())
    async with client(channel) as session:
        agent.ask("U1", "Q1")
        agent.run("start", parent="U1")
        stream = agent.open()
        agent.append(stream, "one")
        await settled()
        before = session.view.messages
        agent.append(stream, " two")
        await settled()
        assert [one.message["parts"][-1]["text"] for one in before] == ["Q1", "one"]
        assert shown(session.view) == ["user:Q1", "assistant:one two"]


# --- a gap ------------------------------------------------------------------------------------------------------------


async def test_a_gap_is_never_seen_as_an_empty_view_and_told_once() -> None:
    agent = Agent(channel := LogChannel())
    async with client(channel) as session:
        whole = talk(agent, 200)
        await settled()
        seen: list[int] = []
        gaps: list[bool] = []
        session.tree.listen(lambda change: seen.append(len(session.view.messages)))
        changes = session.view.changes()
        subscription = channel.subscriptions[0]
        subscription.paused = True
        await settled()
        turn(agent, 201, parent="A200")
        channel.lose()
        subscription.paused = False
        channel.wake()
        await settled()
        gaps.append((await anext(changes)).gap)
        assert shown(session.view) == [*whole, "user:Q201", "assistant:A201"]
        assert min(seen) == 400
        assert len(seen) == 2  # before and behind
        assert gaps == [True]
        turn(agent, 202, parent="A201")
        await settled()
        assert shown(session.view)[-2:] == ["user:Q202", "assistant:A202"]


async def test_what_the_snapshot_does_not_name_disappears() -> None:
    agent = Agent(channel := LogChannel())
    async with client(channel) as session:
        talk(agent, 2)
        await settled()
        gone = [row.serial for row in channel.log if "U2" in str(row.extras) or "R2" in str(row.extras)]
        channel.lose(forget=gone)
        await settled()
        assert shown(session.view) == ["user:Q1", "assistant:A1"]
        assert session.tree.node_of("U2") is None


async def test_after_a_gap_what_was_not_loaded_is_still_older() -> None:
    agent = Agent(channel := LogChannel())
    whole = talk(agent, 4)
    async with client(channel, history_page=9) as session:
        await session.view.load_older(3)
        channel.lose()
        await settled()
        assert shown(session.view) == whole[-3:]
        assert session.view.has_older
        pages = channel.pages
        await session.view.load_older(100)
        assert shown(session.view) == whole
        assert channel.pages == pages  # the snapshot was everything


async def test_a_selection_holds_over_a_gap() -> None:
    agent = Agent(channel := LogChannel())
    async with client(channel) as session:
        talk(agent, 1)
        turn(agent, 3, fork_of="U1")
        await settled()
        assert shown(session.view) == ["user:Q1", "assistant:A1"]
        channel.lose()
        await settled()
        assert shown(session.view) == ["user:Q1", "assistant:A1"]


async def test_a_deleted_channel_is_an_empty_conversation() -> None:
    agent = Agent(channel := LogChannel())
    talk(agent, 2)
    async with client(channel) as session:
        await session.view.load_older(1)
        channel.lose(forget=[row.serial for row in channel.log])
        channel.renumber()
        await settled()
        assert shown(session.view) == []
        assert not session.view.has_older
        agent.ask("V1", "a new one")
        await settled()
        assert shown(session.view) == ["user:a new one"]


async def test_a_page_under_way_when_a_gap_comes_brings_nothing_back() -> None:
    agent = Agent(channel := LogChannel())
    talk(agent, 1)
    history = channel.history

    async with client(channel) as session:

        async def slow(**options: Any) -> Any:
            page = await history(**options)
            channel.history = history  # type: ignore[method-assign]
            channel.lose(forget=[row.serial for row in channel.log])
            await settled()
            return page

        channel.history = slow  # type: ignore[method-assign]
        await session.view.load_older(10)
        assert shown(session.view) == []
        assert session.tree.runs == []


async def test_local_inputs_are_kept_over_a_gap() -> None:
    agent = Agent(channel := LogChannel())
    codec = UIMessageCodec()
    async with ClientSession(channel, codec) as session:
        talk(agent, 1)
        await settled()
        session.tree.insert_local(
            codec.create_user_message({"id": "u", "role": "user", "parts": [{"type": "text", "text": "mine"}]}),
            {"codec-message-id": "U9", "role": "user", "parent": "A1"},
        )
        channel.lose()
        await settled()
        assert shown(session.view) == ["user:Q1", "assistant:A1", "user:mine"]
