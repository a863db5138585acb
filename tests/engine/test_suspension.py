"""A turn that waits: for approvals, for people, for clients; from any process, in any order, for any time."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest

from stepwell import Engine, Flow, Step, TurnResult
from stepwell.channels import MemoryChannels
from stepwell.engine import TurnSuspended
from stepwell.engine._machine import FlowMachine
from stepwell.engine._publication import Publication
from stepwell.engine._stream import TurnStream
from stepwell.engine._turn import TurnTask
from stepwell.engine._working import History, Working
from stepwell.errors import (
    InputTooLargeError,
    InvalidInputError,
    SessionSuspendedError,
    UnknownRequestError,
    UnknownSessionError,
)
from stepwell.flow import Visit
from stepwell.loop import Batch
from stepwell.messages import HistoryCheck, ToolResult
from stepwell.sessions import InboxRow, SessionHead, SessionStore, open_store
from stepwell.testing import FakeClock, ScriptedModel
from suspension_flows import DeskFlow, DeskStep, talk

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def ran() -> list[str]:
    """Which bodies ran, in order, in whatever engine."""
    DeskStep.ran = []
    return DeskStep.ran


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(auto_advance=True)


@pytest.fixture(params=["memory", "sqlite", "postgres"])
async def store(request: pytest.FixtureRequest, tmp_path: Path, clock: FakeClock) -> AsyncGenerator[SessionStore]:
    url = "memory://" if request.param == "memory" else f"sqlite:///{tmp_path / 's.db'}"
    if request.param == "postgres":
        url = request.getfixturevalue("postgres_database")
    opened = open_store(url, clock=clock)
    yield opened
    await opened.close()


def engine_on(store: SessionStore, clock: FakeClock, **options: Any) -> Engine:
    options.setdefault("recovery_interval", None)
    model = ScriptedModel(default=talk)
    model.clock = clock
    return Engine([DeskFlow], models={"scripted": model}, store=store, clock=clock, **options)


async def say(engine: Engine, text: str, session: str | None = None, **options: Any) -> TurnResult:
    return await engine.run("DeskFlow", text, session_id=session, **options)


def asked(result: TurnResult) -> list[tuple[str, str, str]]:
    return [(one.kind, one.tool, one.call) for one in result.pending]


def ids(result: TurnResult) -> list[str]:
    return [one.id for one in result.pending]


async def results(store: SessionStore, session: str) -> dict[str, Any]:
    """Of every call, by its id, from a history that is checked."""
    rows = await store.load_messages(session, "DeskStep")
    HistoryCheck().add_all([row.message for row in rows])
    return {row.message.call: row.message.content for row in rows if isinstance(row.message, ToolResult)}


# -- approvals


async def test_an_approval_is_asked_for_before_the_body(store: SessionStore, clock: FakeClock, ran: list[str]) -> None:
    async with engine_on(store, clock) as engine:
        waits = await say(engine, "refund 5")
        assert (waits.success, waits.completed, waits.status, waits.error) == (True, False, "suspended", None)
        assert asked(waits) == [("approval", "refund", "c-0")]
        assert waits.pending[0].payload == {"tool": "refund", "args": {"amount": 5}}
        assert (waits.pending[0].expires, ran) == (None, [])
        document = await engine.get_session(waits.session_id)
        assert (document["status"], document["turn"]["phase"]) == ("suspended", "suspended")
        done = await engine.answer(waits.session_id, ids(waits)[0], True)
        assert (done.success, done.status, done.message) == (True, "running", "refund=refunded 5")
        assert ran == ["refund 5"]
        assert done.run_id == waits.run_id
        assert done.invocation_id != waits.invocation_id
        assert (await store.load(waits.session_id))[0].turn is None
        again = await say(engine, "look here", waits.session_id)
        assert again.message == "look=saw here"


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (False, {"approved": False}),
        ({"approved": False}, {"approved": False}),
        ({"approved": False, "reason": "too much"}, {"approved": False, "reason": "too much"}),
    ],
)
async def test_the_model_is_told_of_a_denial(clock: FakeClock, ran: list[str], value: Any, told: Any) -> None:
    store = open_store("memory://", clock=clock)
    async with engine_on(store, clock) as engine:
        waits = await say(engine, "refund 5")
        done = await engine.answer(waits.session_id, ids(waits)[0], value)
        assert done.message == f"refund={told}"
        assert await results(store, waits.session_id) == {"c-0": told}
    assert ran == []


async def test_scenario_C34_three_approvals_in_one_stage_run_what_comes_before_them_once(  # noqa: N802
    store: SessionStore, clock: FakeClock, ran: list[str]
) -> None:
    """Three approvals, one behind the other: the bodies before them run 3 times, not 9."""
    async with engine_on(store, clock) as engine:
        waits = await say(engine, "look a, ask one, refund 1")
        session = waits.session_id
        for round_, text in enumerate(("look b, ask two, refund 2", "look c, ask three, refund 3", None)):
            question, approval = ids(waits)
            assert (await engine.answer(session, approval, {"approved": True})).pending[0].id == question
            done = await engine.answer(session, question, f"yes {round_}")
            assert done.status == "running"
            if text is not None:
                waits = await say(engine, text, session)
    bodies = [body for body in ran if not body.startswith("answer")]
    assert bodies == [
        "look a", "ask one", "refund 1", "look b", "ask two", "refund 2", "look c", "ask three", "refund 3",
    ]  # fmt: skip


# -- several at once


async def test_scenario_C35_answers_reach_their_own_calls_in_any_order_and_once(  # noqa: N802
    store: SessionStore, clock: FakeClock, ran: list[str]
) -> None:
    async with engine_on(store, clock) as engine:
        waits = await say(engine, "ask red, ask blue, look sky")
        session = waits.session_id
        assert asked(waits) == [("question", "ask", "c-0"), ("question", "ask", "c-1")]
        red, blue = ids(waits)
        part = await engine.answer(session, blue, "B")
        assert (part.status, ids(part), part.run_id) == ("suspended", [red], waits.run_id)
        twice = await engine.answer(session, blue, "not B")
        assert (twice.status, ids(twice)) == ("suspended", [red])
        done = await engine.answer(session, red, "R")
        assert done.message == "ask={'answered': 'R'}; ask={'answered': 'B'}; look=saw sky"
        assert await engine.answer(session, red, "late") == done
        assert await engine.answer(session, blue, "later") == done
        with pytest.raises(UnknownRequestError, match="waits for no answer"):
            await engine.answer(session, "stale", 1)
        assert ran == ["ask red", "ask blue", "look sky", "answer question", "answer question"]
        assert await store.due() == []


async def test_two_answers_at_the_same_time_are_both_told_what_came_of_them(
    store: SessionStore, clock: FakeClock, ran: list[str]
) -> None:
    async with engine_on(store, clock) as engine:
        waits = await say(engine, "ask red, ask blue")
        answers = [engine.answer(waits.session_id, one, one) for one in reversed(ids(waits))]
        first, second = await asyncio.gather(*answers)
        assert sorted([first.status, second.status]) in (["running", "running"], ["running", "suspended"])
        assert ran.count("answer question") == 2


async def test_what_siblings_wrote_waits_behind_the_results(store: SessionStore, clock: FakeClock) -> None:
    """A message behind the results of a batch stays behind those that come later, also in another process."""
    async with engine_on(store, clock) as engine:
        waits = await say(engine, "leave, look sky")
        assert asked(waits) == [("approval", "leave", "c-0")]
        session = waits.session_id
    async with engine_on(store, clock) as engine:
        done = await engine.answer(session, ids(waits)[0], False)
        assert done.message == "leave=Stay here.; look=saw sky"
        rows = [row.message for row in await store.load_messages(session, "DeskStep")]
        kinds = [type(one).__name__ for one in rows]
        assert kinds == [
            "UserMessage",
            "AssistantMessage",
            "ToolResult",
            "ToolResult",
            "UserMessage",
            "AssistantMessage",
        ]
        assert rows[4].text == "You asked to leave."  # type: ignore[union-attr]


async def test_an_answer_may_route(store: SessionStore, clock: FakeClock) -> None:
    async with engine_on(store, clock) as engine:
        waits = await say(engine, "leave")
        done = await engine.answer(waits.session_id, ids(waits)[0], True)
        assert (done.current, done.message) == ("OtherStep", "Bye.")


# -- a client's tools


async def test_a_clients_tool_gets_its_result_from_the_client(
    store: SessionStore, clock: FakeClock, ran: list[str]
) -> None:
    async with engine_on(store, clock) as engine:
        waits = await say(engine, "locate")
        assert asked(waits) == [("client_tool", "locate", "c-0")]
        assert waits.pending[0].payload == {"tool": "locate", "args": {}}
        done = await engine.answer(waits.session_id, ids(waits)[0], {"at": [1, 2]})
        assert done.message == "locate={'at': [1, 2]}"
        assert ran == ["answer client_tool"]


async def test_answers_are_checked(clock: FakeClock) -> None:
    store = open_store("memory://", clock=clock)
    async with engine_on(store, clock) as engine:
        waits = await say(engine, "refund 1, locate")
        session, (approval, client) = waits.session_id, ids(waits)
        for value in ("yes", 1, None, {}, {"approved": "yes"}, {"approved": True, "reason": 1}):
            with pytest.raises(InvalidInputError, match="approval") as caught:
                await engine.answer(session, approval, value)
            assert caught.value.pointer == "/value"
        with pytest.raises(InvalidInputError):
            await engine.answer(session, client, {"a": object()})
        with pytest.raises(InputTooLargeError):
            await engine.answer(session, client, "x" * 2_000_000)
        deep: Any = 1
        for _ in range(200):
            deep = [deep]
        with pytest.raises(InputTooLargeError):
            await engine.answer(session, client, deep)
        with pytest.raises(UnknownSessionError):
            await engine.answer("nobody", approval, True)
        assert await store.inbox_list(session) == []
        assert (await engine.answer(session, client, None)).status == "suspended"
        assert (await engine.answer(session, approval, True)).message == "refund=refunded 1; locate=ok"


# -- other processes, and crashes


async def test_another_process_answers_and_goes_on(store: SessionStore, clock: FakeClock, ran: list[str]) -> None:
    async with engine_on(store, clock) as one, engine_on(store, clock) as other:
        waits = await say(one, "look a, ask red")
        done = await other.answer(waits.session_id, ids(waits)[0], "R")
        assert done.message == "look=saw a; ask={'answered': 'R'}"
        assert ran == ["look a", "ask red", "answer question"]
        assert await one.answer(waits.session_id, ids(waits)[0], "R") == done
        assert (await say(one, "look b", waits.session_id)).message == "look=saw b"


async def test_an_answer_whose_process_died_is_found(store: SessionStore, clock: FakeClock, ran: list[str]) -> None:
    """The row is written, and nobody goes on: whoever looks next does."""
    async with engine_on(store, clock) as engine:
        waits = await say(engine, "ask red, ask blue")
        red, blue = ids(waits)
        await written(store, waits.session_id, blue, "B")
        await written(store, waits.session_id, red, "R")
    assert [row.session for row in await store.due()] == [waits.session_id]
    async with engine_on(store, clock) as engine:
        assert await engine.recover_all() == 1
        assert await results(store, waits.session_id) == {"c-0": {"answered": "R"}, "c-1": {"answered": "B"}}
        assert await store.due() == []
        assert (await engine.answer(waits.session_id, red, "R")).message.startswith("ask={'answered': 'R'}")
    assert ran == ["ask red", "ask blue", "answer question", "answer question"]


async def written(store: SessionStore, session: str, request: str, value: Any) -> None:
    """What is left of a process that took an answer and died at once."""
    await store.inbox_put(session, InboxRow(request, "answer", msgspec.json.encode({"value": value})))


async def test_half_of_the_answers_wake_nobody_up_for_ever(store: SessionStore, clock: FakeClock) -> None:
    async with engine_on(store, clock) as engine:
        waits = await say(engine, "ask red, ask blue")
        session, (red, blue) = waits.session_id, ids(waits)
        await written(store, session, blue, "B")
        assert [row.session for row in await store.due()] == [session]
        assert ids(await engine.recover(session)) == [red]
        assert await store.due() == []
        revision = (await store.load(session))[0].revision
        assert ids(await engine.recover(session)) == [red]
        assert (await store.load(session))[0].revision == revision


# -- expiry


async def test_a_request_expires(store: SessionStore, clock: FakeClock, ran: list[str]) -> None:
    async with engine_on(store, clock) as engine:
        waits = await say(engine, "ask red 60, ask blue")
        session, (red, blue) = waits.session_id, ids(waits)
        assert waits.pending[0].expires == pytest.approx(clock.time() + 60, abs=5)
        await clock.advance(61)
        assert [row.session for row in await store.due()] == [session]
        with pytest.raises(UnknownRequestError):
            await engine.answer(session, red, "too late")
        assert await engine.recover_all() == 1
        assert await store.due() == []
        done = await engine.answer(session, blue, "B")
        assert done.message == "ask={'expired': True}; ask={'answered': 'B'}"
        with pytest.raises(UnknownRequestError):
            await engine.answer(session, red, "too late")
    assert ran == ["ask red", "ask blue", "answer question"]


async def test_the_last_request_that_expires_lets_the_turn_go_on(store: SessionStore, clock: FakeClock) -> None:
    async with engine_on(store, clock) as engine:
        waits = await say(engine, "ask red 60, ask blue 120")
        session = waits.session_id
        for _ in range(2):
            await clock.advance(61)
            assert await engine.recover_all() == 1
        assert (await store.load(session))[0].status == "running"
        assert await results(store, session) == {"c-0": {"expired": True}, "c-1": {"expired": True}}


async def test_the_recovery_loop_takes_up_what_expired(clock: FakeClock) -> None:
    store = open_store("memory://", clock=clock)
    clock = FakeClock()
    store = open_store("memory://", clock=clock)
    async with engine_on(store, clock, recovery_interval=5.0) as engine:
        waits = await say(engine, "ask red 60")
        await clock.advance(70)
        await clock.settle()
        assert await results(store, waits.session_id) == {"c-0": {"expired": True}}


# -- messages while it waits


async def test_a_message_answers_a_single_question(store: SessionStore, clock: FakeClock, ran: list[str]) -> None:
    async with engine_on(store, clock) as engine:
        waits = await say(engine, "ask red, locate", idempotency_key="k-1")
        session, (question, client) = waits.session_id, ids(waits)
        assert await say(engine, "ask red, locate", session, idempotency_key="k-1") == waits
        refused = await say(engine, "dark", session)
        assert (refused.success, refused.status, ids(refused)) == (False, "suspended", [question, client])
        assert refused.error is not None
        assert (refused.error.code, refused.error.ids["pending"]) == ("session_suspended", f"{question}, {client}")
        with pytest.raises(SessionSuspendedError) as caught:
            await engine.run_or_raise("DeskFlow", "dark", session_id=session)
        assert caught.value.pending == (question, client)
        await engine.answer(session, client, 1)
        done = await say(engine, "dark", session, idempotency_key="k-2")
        assert done.message == "ask={'answered': 'dark'}; locate=1"
        assert (done.run_id, done.status) == (waits.run_id, "running")
        assert await say(engine, "dark", session, idempotency_key="k-2") == done
        with pytest.raises(UnknownRequestError):
            await engine.answer(session, question, "bright")
        assert ran == ["ask red", "answer question", "answer client_tool"] or ran == [
            "ask red", "answer client_tool", "answer question",
        ]  # fmt: skip


async def test_a_message_may_abandon_what_waits(store: SessionStore, clock: FakeClock, ran: list[str]) -> None:
    async with engine_on(store, clock) as engine:
        waits = await say(engine, "look a, refund 5, locate")
        session = waits.session_id
        await engine.answer(session, ids(waits)[1], 1)
        fresh = await say(engine, "look b", session, on_suspended="abandon")
        assert (fresh.message, fresh.status) == ("look=saw b", "running")
        assert fresh.run_id != waits.run_id
        rows = [row.message for row in await store.load_messages(session, "DeskStep")]
        HistoryCheck().add_all(rows)
        ended = [(row.call, row.outcome) for row in rows if isinstance(row, ToolResult)]
        assert ended[:3] == [("c-0", "ok"), ("c-1", "not_run"), ("c-2", "not_run")]
        assert ran == ["look a", "look b"]
        with pytest.raises(UnknownRequestError):
            await engine.answer(session, ids(waits)[0], True)
        known = await engine.answer(session, ids(waits)[1], 1)  # it was given in time, and this is what came of it
        assert (known.run_id, known.error and known.error.code) == (waits.run_id, "turn_cancelled")
        assert await store.due() == []


async def test_a_message_finds_a_turn_that_has_all_its_answers(store: SessionStore, clock: FakeClock) -> None:
    """It goes on first; then the message has its own turn."""
    async with engine_on(store, clock) as engine:
        waits = await say(engine, "ask red 60")
        await clock.advance(61)
        done = await say(engine, "look b", waits.session_id)
        assert (done.message, done.run_id == waits.run_id) == ("look=saw b", False)
        fourth = (await store.load_messages(waits.session_id, "DeskStep"))[3].message
        assert fourth.text == "ask={'expired': True}"  # type: ignore[union-attr]


async def test_a_request_id_is_used_once(store: SessionStore, clock: FakeClock) -> None:
    async with engine_on(store, clock) as engine:
        waits = await say(engine, "ask red 60 mine")
        assert ids(waits) == ["mine"]
        await engine.answer(waits.session_id, "mine", 1)
        again = await say(engine, "ask red 60 mine", waits.session_id)
        assert again.error is not None
        assert again.error.code == "invalid_outcome"
        assert (await say(engine, "look b", waits.session_id)).success


async def test_listeners_hear_of_it(clock: FakeClock) -> None:
    heard: list[Any] = []
    store = open_store("memory://", clock=clock)
    async with engine_on(store, clock, listeners=[heard.append]) as engine:
        waits = await say(engine, "refund 5")
    assert [type(one).__name__ for one in heard][-4:] == ["Accepted", "Committed", "TurnSuspended", "TurnFinished"]
    assert next(one for one in heard if isinstance(one, TurnSuspended)).pending == waits.pending


async def test_a_message_that_is_sent_twice_does_not_answer_the_question_that_it_led_to(ran: list[str]) -> None:
    """The second comes to another process, which gets the session when the first has just been suspended."""
    clock, asked_, go_on = FakeClock(), asyncio.Event(), anyio.Event()
    store = open_store("memory://", clock=clock)

    def slowly(request: Any) -> Any:
        asked_.set()
        return talk(request).gated(go_on)

    models = {"scripted": ScriptedModel(default=slowly)}
    one = Engine([DeskFlow], models=models, store=store, clock=clock, recovery_interval=None)
    other = engine_on(store, clock)
    other._core.owner = "another process"  # pyright: ignore[reportPrivateUsage]
    async with one, other:
        first = asyncio.ensure_future(say(one, "ask when", idempotency_key="k"))
        await asked_.wait()
        second = asyncio.ensure_future(say(other, "ask when", idempotency_key="k"))
        await clock.advance(0)  # it has seen that the session is busy, and will look again
        go_on.set()
        waits = await first
        assert waits.status == "suspended"
        await clock.advance(5)
        assert ids(await second) == ids(waits)
    assert ran == ["ask when"]


# -- for a long time


def living(*kinds: type[Any]) -> dict[str, int]:
    """How many objects of these types there are in this process."""
    gc.collect()
    found = Counter(type(one).__name__ for one in gc.get_objects() if isinstance(one, kinds))
    return dict(found)


async def test_a_hundred_sessions_wait_for_a_week_and_nothing_of_them_is_kept(
    store: SessionStore, clock: FakeClock
) -> None:
    kinds = (Working, History, TurnTask, FlowMachine, Flow, Step, Publication, TurnStream, SessionHead, Visit, Batch)
    channels = MemoryChannels(clock=clock)
    async with engine_on(store, clock, channels=channels, recovery_interval=3600.0) as engine:
        await clock.settle()
        before, timers = living(*kinds), clock.timers
        waits = [await say(engine, "refund 5, ask red") for _ in range(100)]
        await clock.settle()
        assert living(*kinds) == before
        assert clock.timers < timers + 5  # those of the engine itself come and go
        await clock.advance(3_600)
        assert living(*kinds) == before
    await clock.advance(7 * 86_400)
    async with engine_on(store, clock, channels=channels) as engine:
        for one in waits:
            refund, red = ids(one)
            await engine.answer(one.session_id, red, "R")
            done = await engine.answer(one.session_id, refund, True)
            assert done.message == "refund=refunded 5; ask={'answered': 'R'}"
