"""Effects: never twice, whoever dies between the intent and the commit; of the rest `on_unknown` decides."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from anyio import CancelScope

from effect_kit import (
    Bank,
    Life,
    Mortal,
    PayFlow,
    PayStep,
    SideBySideFlow,
    engine_on,
    journal,
    live,
    outcomes,
    state,
    stored,
)
from stepwell import Engine, Flow, Step, ToolContext, tool, tools
from stepwell.errors import FlowDefinitionError, NotDone, StoreBusyError, StoreDataError
from stepwell.messages import ToolResult
from stepwell.sessions import MemoryStore, SessionStore, open_store
from stepwell.testing import FakeClock, Reply, ScriptedModel, TurnHarness

pytestmark = pytest.mark.anyio


@pytest.fixture(autouse=True)
def bank() -> Bank:
    PayStep.bank = Bank()
    return PayStep.bank


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock(auto_advance=True)


@pytest.fixture
def memory(clock: FakeClock) -> SessionStore:
    return MemoryStore(clock)


@pytest.fixture(params=["memory", "sqlite", "postgres"])
async def store(request: pytest.FixtureRequest, tmp_path: Path, clock: FakeClock) -> AsyncGenerator[SessionStore]:
    url = "memory://" if request.param == "memory" else f"sqlite:///{tmp_path / 's.db'}"
    if request.param == "postgres":
        url = request.getfixturevalue("postgres_database")
    opened = open_store(url, clock=clock)
    yield opened
    await opened.close()


NOBODY_KNOWS = "Whether it had an effect is unknown. Do not repeat it."


async def points_until(text: str, tool: str) -> int:
    """At which point of an undisturbed process the bank has just been charged by a tool."""
    clock, life = FakeClock(auto_advance=True), Life()
    before = PayStep.bank
    counting = PayStep.bank = Bank()
    found: list[int] = []
    charge = counting.charge

    def charged(name: str, context: ToolContext) -> None:
        charge(name, context)
        if name == tool:
            found.append(life.points)

    counting.charge = charged  # type: ignore[method-assign]
    await live(counting, MemoryStore(clock), clock, life, text)
    PayStep.bank = before
    return found[0]


# -- crashes


@pytest.mark.parametrize("charged", [False, True])
async def test_scenario_C23_an_effect_with_a_key_is_repeated_under_it(  # noqa: N802
    bank: Bank, store: SessionStore, clock: FakeClock, charged: bool
) -> None:
    """The process dies in the body: the next one runs it again, and the bank knows the key."""
    at = await points_until("retry", "retry") - (0 if charged else 1)
    assert await live(bank, store, clock, Life(at), "retry") is None
    assert await journal(store) == ["intent"]
    result = await live(bank, store, clock, Life(), None)
    assert result is not None
    assert (result.success, result.message) == (True, "retry ok")
    tried = bank.of("retry")
    assert [attempt for _, attempt in tried] == ([1, 2] if charged else [2])
    assert len({key for key, _ in tried}) == 1
    assert tried[0][0].endswith("-step-0::0")
    assert await stored(store) == {"retry": ("ok", "paid by retry")}
    assert await journal(store) == []


@pytest.mark.parametrize("charged", [False, True])
async def test_scenario_C23_an_effect_that_asks_suspends_the_turn_and_is_never_repeated(  # noqa: N802
    bank: Bank, store: SessionStore, clock: FakeClock, charged: bool
) -> None:
    at = await points_until("look, ask", "ask") - (0 if charged else 1)
    assert await live(bank, store, clock, Life(at), "look, ask") is None
    waits = await live(bank, store, clock, Life(), None)
    assert waits is not None
    assert (waits.status, [(one.kind, one.tool) for one in waits.pending]) == ("suspended", [("question", "ask")])
    assert waits.pending[0].payload["tool"] == "ask"
    assert await stored_open(store) == ["ask"]
    # Whoever comes next asks the same again, and does nothing else.
    async with engine_on(store, clock) as engine:
        done = await engine.answer(waits.session_id, waits.pending[0].id, "the bank says it did")
    assert done.message == "look ok, ask ok"
    assert (await stored(store))["ask"] == ("ok", "the bank says it did")
    assert len(bank.of("ask")) == int(charged)
    assert await journal(store) == []


async def stored_open(store: SessionStore) -> list[str]:
    """Tools of the calls without a result."""
    [session], _ = await store.list()
    history = [row.message for row in await store.load_messages(session.id, "PayStep")]
    calls = [call for message in history for call in getattr(message, "calls", ())]
    answered = {getattr(message, "call", None) for message in history}
    return [call.name for call in calls if call.id not in answered]


@pytest.mark.parametrize("charged", [False, True])
async def test_scenario_C24_the_model_is_told_that_it_is_unknown_and_nothing_runs_again(  # noqa: N802
    bank: Bank, store: SessionStore, clock: FakeClock, charged: bool
) -> None:
    at = await points_until("look, fail, retry", "fail") - (0 if charged else 1)
    assert await live(bank, store, clock, Life(at), "look, fail, retry") is None
    result = await live(bank, store, clock, Life(), None)
    assert result is not None
    # The siblings go on: they are not unknown.
    assert result.message == "look ok, fail unknown, retry ok"
    outcome, content = (await stored(store))["fail"]
    assert outcome == "unknown"
    assert content == {"error": f"This call was interrupted. {NOBODY_KNOWS}"}
    assert len(bank.of("fail")) == int(charged)
    assert "fail" not in await state(store)
    assert await journal(store) == []


async def test_an_effect_that_is_done_is_not_run_again_and_all_of_it_counts(
    bank: Bank, store: SessionStore, clock: FakeClock
) -> None:
    """The process dies between the result and the commit: writes, outcome and messages come from the journal."""
    at = await points_until("leave", "leave") + 3  # the row is written, and the answer has come
    assert await live(bank, store, clock, Life(at), "leave") is None
    assert await journal(store) == ["done"]
    result = await live(bank, store, clock, Life(), None)
    assert result is not None
    assert (result.success, result.current) == (True, "ThanksStep")
    assert len(bank.of("leave")) == 1
    assert await stored(store) == {"leave": ("ok", "bye")}
    assert await state(store) == {"leave": "0::0"}
    assert await state(store, "ThanksStep") == {"tip": {"given": True}}
    [session], _ = await store.list()
    texts = [getattr(row.message, "text", None) for row in await store.load_messages(session.id, "PayStep")]
    assert "Paid on leaving." in texts
    there = [getattr(row.message, "text", None) for row in await store.load_messages(session.id, "ThanksStep")]
    assert "They paid." in there


async def test_calls_in_order_read_what_an_effect_of_a_dead_process_wrote(
    bank: Bank, memory: SessionStore, clock: FakeClock
) -> None:
    seen: list[Any] = []

    class Reads(PayStep):
        id = "PayStep"

        @tool
        async def look(self) -> str:
            """Look."""
            seen.append([self.get_state().get(name) for name in ("fail", "retry")])
            self.bank.life.point()
            return "seen"

    class ReadsFlow(PayFlow):
        id = "PayFlow"

        def define_steps(self) -> list[Step[Any, Any]]:
            return [Reads(self)]

    at = await points_until("fail, retry, look", "retry") + 4
    assert await live(bank, memory, clock, Life(at), "fail, retry, look", ReadsFlow) is None
    result = await live(bank, memory, clock, Life(), None, ReadsFlow)
    assert result is not None
    assert seen == [["0::0", "0::1"]] * 2
    assert len(bank.of("fail")) == 1


async def test_what_says_that_nothing_happened_may_run_again(bank: Bank, store: SessionStore, clock: FakeClock) -> None:
    at = await points_until("decline, retry", "decline") + 2
    assert await live(bank, store, clock, Life(at), "decline, retry") is None
    assert await journal(store) == ["refused"]
    result = await live(bank, store, clock, Life(), None)
    assert result is not None
    assert result.message == "decline not_run, retry ok"
    assert [attempt for _, attempt in bank.of("decline")] == [1, 2]
    assert (await stored(store))["decline"] == ("not_run", {"error": "Nothing was done: the card was declined"})
    assert await state(store) == {"retry": "0::1"}


async def test_a_set_of_calls_is_one_effect(bank: Bank, store: SessionStore, clock: FakeClock) -> None:
    at = await points_until("give, take", "both")
    assert await live(bank, store, clock, Life(at + 3), "give, take") is None
    result = await live(bank, store, clock, Life(), None)
    assert result is not None
    assert await stored(store) == {"give": ("ok", "paid by both"), "take": ("ok", "paid by both")}
    assert len(bank.tried) == 1
    assert await state(store) == {"both": "0::0"}


async def test_a_set_of_calls_that_broke_off_is_unknown_as_a_whole(
    bank: Bank, memory: SessionStore, clock: FakeClock
) -> None:
    at = await points_until("give, take", "both")
    assert await live(bank, memory, clock, Life(at), "give, take") is None
    result = await live(bank, memory, clock, Life(), None)
    assert result is not None
    assert {name: outcome for name, (outcome, _) in (await stored(memory)).items()} == {
        "give": "unknown",
        "take": "unknown",
    }
    assert len(bank.tried) == 1


async def test_an_approved_effect_that_broke_off_asks_and_is_not_approved_again(
    bank: Bank, memory: SessionStore, clock: FakeClock
) -> None:
    waits = await live(bank, memory, clock, Life(), "allowed")
    assert waits is not None
    [approval] = waits.pending
    life = bank.life = Life()
    engine = engine_on(Mortal(memory, life), clock)
    await engine.start()
    charge = bank.charge

    def dies(name: str, context: ToolContext) -> None:
        charge(name, context)
        life.ends_at = life.points + 1
        life.point()

    bank.charge = dies  # type: ignore[method-assign]
    assert not (await engine.answer(waits.session_id, approval.id, True)).success
    await engine.close()
    bank.charge = charge
    again = await live(bank, memory, clock, Life(), None)
    assert again is not None
    [question] = again.pending
    assert (question.kind, question.id == approval.id) == ("question", False)
    async with engine_on(memory, clock) as engine:
        done = await engine.answer(waits.session_id, question.id, "it did")
    assert done.message == "allowed ok"
    assert len(bank.tried) == 1


async def test_a_question_that_is_abandoned_leaves_the_call_unknown(
    bank: Bank, store: SessionStore, clock: FakeClock
) -> None:
    at = await points_until("allowed, ask", "ask")
    await live(bank, store, clock, Life(at), "allowed, ask")
    waits = await live(bank, store, clock, Life(), None)
    assert waits is not None
    assert [one.kind for one in waits.pending] == ["approval", "question"]
    assert await journal(store) == ["intent"]
    async with engine_on(store, clock) as engine:
        result = await engine.run("PayFlow", "look", session_id=waits.session_id, on_suspended="abandon")
    assert result.message == "look ok"
    found = await stored(store)
    assert (found["allowed"][0], found["ask"][0]) == ("not_run", "unknown")
    assert len(bank.tried) == 1
    assert await journal(store) == []


async def test_an_answer_that_cannot_be_used_leaves_the_call_unknown(
    bank: Bank, memory: SessionStore, clock: FakeClock
) -> None:
    class Deaf(PayStep):
        id = "PayStep"
        tool_errors = "report"

        async def on_answer(self, request: Any, value: Any) -> Any:
            raise ValueError("what was that?")

    class DeafFlow(PayFlow):
        id = "PayFlow"

        def define_steps(self) -> list[Step[Any, Any]]:
            return [Deaf(self)]

    at = await points_until("ask", "ask")
    await live(bank, memory, clock, Life(at), "ask")
    async with engine_on(memory, clock, DeafFlow) as engine:
        [session], _ = await memory.list()
        waits = await engine.recover(session.id)
        done = await engine.answer(session.id, waits.pending[0].id, "yes")
    assert done.message == "ask unknown"
    assert len(bank.tried) == 1


# -- any crash


BATCH = "fail, look, retry, decline, ask, boom"


async def settled(
    bank: Bank, clock: FakeClock, deaths: list[int], flow: type[Flow] = PayFlow, dice: random.Random | None = None
) -> None:
    """Processes one after the other, each to its death, and one that lives; then everything is as it must be."""
    store = MemoryStore(clock)
    said: str | None = BATCH
    for at in deaths:
        if await live(bank, store, clock, Life(at), said, flow, dice) is not None:
            break
        if (await store.list())[0]:
            said = None
    if said is not None and not (await store.list())[0]:
        return  # it died before there was a session
    result = await live(bank, store, clock, Life(), None, flow, dice)
    assert result is not None
    if result.pending:
        async with engine_on(store, clock, flow) as engine:
            result = await engine.answer(result.session_id, result.pending[0].id, "asked")
    assert result.success
    found = await stored(store)
    assert set(found) == set(BATCH.split(", "))
    for name in ("fail", "ask", "boom"):
        assert len(bank.of(name)) <= 1, f"{name} was charged twice"
    assert len({key for key, _ in bank.of("retry")}) == 1
    kept = await state(store)
    for name in ("fail", "retry", "ask"):
        if found[name] == ("ok", f"paid by {name}"):
            assert bank.of(name), f"{name} is said to be paid"
            assert name in kept
        else:
            assert name not in kept
    assert found["fail"][0] in ("ok", "unknown")
    assert found["retry"][0] == "ok"
    assert found["decline"][0] in ("not_run", "unknown")
    assert found["boom"][0] == "unknown"
    assert found["look"] == ("ok", "seen")
    assert await journal(store) == []
    assert (await store.load(result.session_id))[0].turn is None


async def points_of(text: str) -> int:
    clock, life = FakeClock(auto_advance=True), Life()
    before = PayStep.bank
    PayStep.bank = Bank()
    await live(PayStep.bank, MemoryStore(clock), clock, life, text)
    PayStep.bank = before
    return life.points


async def test_wherever_a_process_dies_nothing_is_charged_twice(clock: FakeClock) -> None:
    points = await points_of(BATCH)
    assert points > 30
    for at in range(1, points + 1):
        bank = PayStep.bank = Bank()
        await settled(bank, clock, [at])


@pytest.mark.parametrize("flow", [PayFlow, SideBySideFlow])
async def test_however_often_processes_die_nothing_is_charged_twice(clock: FakeClock, flow: Any) -> None:
    points = await points_of(BATCH)
    for seed in range(200):
        dice = random.Random(seed)
        bank = PayStep.bank = Bank()
        deaths = [dice.randrange(1, points) for _ in range(dice.randrange(1, 5))]
        try:
            await settled(bank, clock, deaths, flow, dice)
        except BaseException as error:
            error.add_note(f"seed {seed}: processes that died at {deaths}")
            raise


# -- without a crash


async def test_an_exception_in_an_effect_leaves_it_unknown_to_the_model(
    bank: Bank, store: SessionStore, clock: FakeClock
) -> None:
    async with engine_on(store, clock) as engine:
        result = await engine.run("PayFlow", "boom, fail")
    assert result.message == "boom unknown, fail ok"
    text = f"The tool failed: ValueError: the line broke. {NOBODY_KNOWS}"
    assert (await stored(store))["boom"] == ("unknown", {"error": text})
    assert await journal(store) == []


async def test_a_turn_that_fails_in_an_effect_keeps_the_effects_before_it(
    bank: Bank, store: SessionStore, clock: FakeClock
) -> None:
    async with engine_on(store, clock) as engine:
        result = await engine.run("PayFlow", "fail, crash, retry")
        assert result.error is not None
        assert result.error.code == "handler"
        assert await outcomes(store) == ["ok", "unknown", "not_run"]
        assert await state(store) == {"fail": "0::0"}
        assert await journal(store) == []
        assert (await engine.run("PayFlow", "look", session_id=result.session_id)).message == "look ok"
    assert [name for name, _, _ in bank.tried] == ["fail", "crash"]


async def test_scenario_C25_effects_beside_one_that_fails_the_turn_are_recorded(  # noqa: N802
    bank: Bank, store: SessionStore, clock: FakeClock
) -> None:
    async with engine_on(store, clock, SideBySideFlow) as engine:
        result = await engine.run("SideBySideFlow", "fail, crash, retry")
        assert not result.success
        assert await outcomes(store) == ["ok", "unknown", "ok"]
        assert await state(store) == {"fail": "0::0", "retry": "0::2"}
        assert await journal(store) == []
        assert (await engine.run("SideBySideFlow", "look", session_id=result.session_id)).message == "look ok"


async def test_an_effect_that_is_out_of_time_is_unknown(bank: Bank, memory: SessionStore) -> None:
    clock = FakeClock()
    async with engine_on(memory, clock) as engine:
        turn = asyncio.ensure_future(engine.run("PayFlow", "slow"))
        await bank.reached.wait()
        await clock.advance(21)
        result = await turn
    assert result.message == "slow unknown"
    assert "ToolTimeoutError" in (await stored(memory))["slow"][1]["error"]
    assert bank.tried == []
    assert await journal(memory) == []


async def test_the_time_of_an_effect_begins_when_its_intent_is_on_disk(bank: Bank, memory: SessionStore) -> None:
    clock = FakeClock(auto_advance=True)
    slow_disk = Mortal(memory)

    async def wait(name: str, *args: Any) -> None:
        if name == "journal_put" and args[1].state == "intent":
            await clock.sleep(25)

    slow_disk.before = wait
    bank.gate.set()
    async with engine_on(slow_disk, clock, lease_ttl=60) as engine:
        assert (await engine.run("PayFlow", "slow")).message == "slow ok"


async def test_calls_that_were_refused_leave_nothing_in_the_journal(memory: SessionStore, clock: FakeClock) -> None:
    written: Any = Mortal(memory)
    async with TurnHarness(
        PayFlow, model=ScriptedModel([Reply.tool_call("fail", {"n": 1}), "No."]), store=written, clock=clock
    ) as talk:
        await talk.say("pay")
    assert await outcomes(memory) == ["error"]
    assert written.calls["journal_put"] == 0


async def test_a_turn_that_was_not_interrupted_never_reads_the_journal_and_pays_for_effects_only(
    memory: SessionStore, clock: FakeClock
) -> None:
    counted = Mortal(memory)
    cleared: list[str | None] = []

    async def note(name: str, *args: Any) -> None:
        if name == "save":
            cleared.append(args[1].clear_journal)

    counted.before = note
    async with engine_on(counted, clock) as engine:
        first = await engine.run("PayFlow", "look, look")
        assert counted.calls["journal_put"] == 0
        assert cleared == [None] * len(cleared)
        await engine.run("PayFlow", "fail, look", session_id=first.session_id)
    assert counted.calls["journal_put"] == 2
    assert counted.calls["journal_load"] == 0
    assert len([prefix for prefix in cleared if prefix is not None]) == 1


# -- cancels


@pytest.mark.parametrize("flow", [PayFlow, SideBySideFlow])
async def test_scenario_C37_a_cancel_in_the_first_of_five_alerts(  # noqa: N802
    bank: Bank, store: SessionStore, clock: FakeClock, flow: Any
) -> None:
    disk, others, ended = Mortal(store), asyncio.Event(), [0]

    async def count(name: str, *args: Any) -> None:
        if name == "journal_put" and args[1].state == "done":
            ended[0] += 1
            if ended[0] == 4:
                others.set()

    disk.behind = count
    async with engine_on(disk, clock, flow) as engine:
        session = (await engine.run(flow.id, "look")).session_id
        turn = asyncio.ensure_future(engine.run(flow.id, "slow, fail, fail, fail, fail", session_id=session))
        await bank.reached.wait()
        done = 4 if flow is SideBySideFlow else 0
        if done:
            await others.wait()
        assert await engine.cancel(session, reason="enough")
        result = await turn
        assert not result.success
        assert result.error is not None
        assert result.error.code == "turn_cancelled"
        rest = ["ok"] * 4 if done else ["not_run"] * 4
        assert await outcomes(store) == ["ok", "unknown", *rest]
        assert len(bank.tried) == done
        assert await journal(store) == []
        after = await engine.run(flow.id, "fail", session_id=session)
        assert (after.success, after.message) == (True, "fail ok")


async def test_an_effect_that_shields_itself_from_a_cancel_is_done(
    bank: Bank, store: SessionStore, clock: FakeClock
) -> None:
    bank.shield = True
    async with engine_on(store, clock) as engine:
        session = (await engine.run("PayFlow", "look")).session_id
        turn = asyncio.ensure_future(engine.run("PayFlow", "slow, look, fail", session_id=session))
        await bank.reached.wait()
        stop = asyncio.ensure_future(engine.cancel(session))
        await asyncio.sleep(0)
        bank.gate.set()
        assert await stop
        assert not (await turn).success
    assert await outcomes(store) == ["ok", "ok", "not_run", "not_run"]
    assert await state(store) == {"slow": "0::0"}


async def test_a_cancel_while_the_result_is_on_its_way_to_the_disk_does_not_lose_it(
    bank: Bank, memory: SessionStore, clock: FakeClock
) -> None:
    disk, begun, go_on = Mortal(memory), asyncio.Event(), asyncio.Event()

    async def wait(name: str, *args: Any) -> None:
        if name == "journal_put" and args[1].state == "done":
            begun.set()
            await go_on.wait()

    disk.before = wait
    async with engine_on(disk, clock) as engine:
        session = (await engine.run("PayFlow", "look")).session_id
        turn = asyncio.ensure_future(engine.run("PayFlow", "fail, retry", session_id=session))
        await begun.wait()
        stop = asyncio.ensure_future(engine.cancel(session))
        await asyncio.sleep(0)
        go_on.set()
        assert await stop
        assert not (await turn).success
    assert await outcomes(memory) == ["ok", "ok", "not_run"]
    assert await state(memory) == {"fail": "0::0"}
    assert await journal(memory) == []


async def test_a_cancel_while_the_intent_is_on_its_way_to_the_disk_keeps_the_effect_from_beginning(
    bank: Bank, memory: SessionStore, clock: FakeClock
) -> None:
    """The store finishes what it has begun, whoever is cancelled meanwhile."""
    disk = Mortal(memory)
    stops: list[asyncio.Future[bool]] = []

    async def stop(name: str, *args: Any) -> None:
        if name == "journal_put" and args[1].state == "intent":
            with CancelScope(shield=True):
                stops.append(asyncio.ensure_future(engine.cancel(session)))
                await asyncio.sleep(0)

    disk.behind = stop
    async with engine_on(disk, clock) as engine:
        session = (await engine.run("PayFlow", "look")).session_id
        assert not (await engine.run("PayFlow", "fail, retry", session_id=session)).success
        assert [await one for one in stops] == [True]
    assert bank.tried == []
    assert await outcomes(memory) == ["ok", "not_run", "not_run"]
    assert await journal(memory) == []


async def test_an_engine_that_goes_down_while_the_result_is_on_its_way_to_the_disk_does_not_lose_it(
    bank: Bank, memory: SessionStore, clock: FakeClock
) -> None:
    disk, begun, go_on = Mortal(memory), asyncio.Event(), asyncio.Event()

    async def wait(name: str, *args: Any) -> None:
        if name == "journal_put" and args[1].state == "done":
            begun.set()
            await go_on.wait()

    disk.before = wait
    engine = engine_on(disk, clock)
    await engine.start()
    turn = asyncio.ensure_future(engine.run("PayFlow", "fail, retry", idempotency_key="k"))
    await begun.wait()
    closing = asyncio.ensure_future(engine.close())
    await clock.advance(0)
    go_on.set()
    await closing
    assert not (await turn).success
    assert await journal(memory) == ["done"]
    result = await live(bank, memory, clock, Life(), None)
    assert result is not None
    assert result.message == "fail ok, retry ok"
    assert len(bank.tried) == 2


async def test_an_engine_that_goes_down_in_an_effect_leaves_it_unknown_for_the_next(
    bank: Bank, store: SessionStore, clock: FakeClock
) -> None:
    engine = engine_on(store, clock)
    await engine.start()
    turn = asyncio.ensure_future(engine.run("PayFlow", "fail, slow, retry", idempotency_key="k"))
    await bank.reached.wait()
    await engine.close(grace=0)
    assert not (await turn).success
    assert await journal(store) == ["done", "unknown"]
    result = await live(bank, store, clock, Life(), None)
    assert result is not None
    assert result.message == "fail ok, slow unknown, retry ok"
    assert [name for name, _, _ in bank.tried] == ["fail", "retry"]


# -- the lease, and a store that is away


async def test_an_effect_does_not_begin_where_somebody_else_has_the_session(
    bank: Bank, store: SessionStore, clock: FakeClock
) -> None:
    async def take() -> None:
        [session], _ = await store.list()
        _, lease = await store.load(session.id)
        assert lease is not None
        await store.acquire(session.id, "somebody else", ttl=60, supersede=lease.owner)

    bank.looked = take
    async with engine_on(store, clock) as engine:
        result = await engine.run("PayFlow", "look, fail")
    assert result.error is not None
    assert result.error.code == "stale_writer"
    assert bank.tried == []
    assert await journal(store) == []


async def test_an_effect_does_not_begin_when_the_lease_ran_out_while_its_intent_was_written(
    bank: Bank, memory: SessionStore
) -> None:
    clock = FakeClock()
    disk = Mortal(memory)

    writing = asyncio.Event()

    async def slow(name: str, *_: Any) -> None:
        if name == "renew":
            await clock.sleep(1000)
        if name == "journal_put":
            writing.set()
            await clock.sleep(16)

    disk.before = slow
    async with engine_on(disk, clock) as engine:
        turn = asyncio.ensure_future(engine.run("PayFlow", "fail"))
        await writing.wait()
        await clock.advance(30)
        result = await turn
    assert result.error is not None
    assert result.error.code == "stale_writer"
    assert bank.tried == []


async def test_a_store_that_never_answers_keeps_an_effect_no_longer_than_the_lease(
    bank: Bank, memory: SessionStore
) -> None:
    clock, disk, writing = FakeClock(), Mortal(memory), asyncio.Event()

    async def never(name: str, *args: Any) -> None:
        if name == "renew":
            raise StoreBusyError("away")
        if name == "journal_put" and args[1].state == "done":
            writing.set()
            await clock.sleep(1000)

    disk.before = never
    async with engine_on(disk, clock) as engine:
        turn = asyncio.ensure_future(engine.run("PayFlow", "fail"))
        await writing.wait()
        await clock.advance(14)
        assert not turn.done()
        await clock.advance(8)
        assert turn.done()
        assert not (await turn).success
    assert await journal(memory) == ["intent"]
    assert len(bank.tried) == 1


@pytest.mark.parametrize("state_", ["intent", "done"])
@pytest.mark.parametrize("when", ["before", "behind"])
async def test_a_journal_row_without_an_answer_is_written_again(
    bank: Bank, store: SessionStore, clock: FakeClock, state_: str, when: str
) -> None:
    disk = Mortal(store)
    lost: list[str] = []

    async def lose(name: str, *args: Any) -> None:
        if name == "journal_put" and args[1].state == state_ and len(lost) < 3:
            lost.append(name)
            raise StoreBusyError("The answer was lost.")

    setattr(disk, when, lose)
    async with engine_on(disk, clock) as engine:
        result = await engine.run("PayFlow", "fail")
    assert result.message == "fail ok"
    assert len(lost) == 3
    assert len(bank.tried) == 1
    assert await journal(store) == []


async def test_an_effect_whose_intent_cannot_be_written_does_not_begin(
    bank: Bank, memory: SessionStore, clock: FakeClock
) -> None:
    disk = Mortal(memory)

    async def full(name: str, *args: Any) -> None:
        if name == "journal_put":
            raise StoreDataError("The disk is full.")

    disk.before = full
    async with engine_on(disk, clock) as engine:
        result = await engine.run("PayFlow", "retry, fail")
    assert result.error is not None
    assert result.error.code == "store_data"
    assert await outcomes(memory) == ["not_run", "not_run"]
    assert bank.tried == []


async def test_an_effect_that_cannot_be_repeated_after_all_is_unknown(
    bank: Bank, memory: SessionStore, clock: FakeClock
) -> None:
    """A process died in it, and the next one's disk is full."""
    at = await points_until("retry", "retry")
    await live(bank, memory, clock, Life(at), "retry")
    disk = Mortal(memory)

    async def full(name: str, *_: Any) -> None:
        if name == "journal_put":
            raise StoreDataError("The disk is full.")

    disk.before = full
    [session], _ = await memory.list()
    async with engine_on(disk, clock) as engine:
        assert not (await engine.recover(session.id)).success
    assert await outcomes(memory) == ["unknown"]
    assert len(bank.tried) == 1


async def test_an_effect_that_is_cancelled_before_it_is_repeated_is_unknown(
    bank: Bank, memory: SessionStore, clock: FakeClock
) -> None:
    at = await points_until("retry", "retry")
    await live(bank, memory, clock, Life(at), "retry")
    disk = Mortal(memory)
    stops: list[asyncio.Future[bool]] = []
    [session], _ = await memory.list()

    async def stop(name: str, *args: Any) -> None:
        if name == "journal_put" and args[1].state == "intent" and not stops:
            with CancelScope(shield=True):
                stops.append(asyncio.ensure_future(engine.cancel(session.id)))
                await asyncio.sleep(0)

    disk.behind = stop
    async with engine_on(disk, clock) as engine:
        assert not (await engine.recover(session.id)).success
        assert [await one for one in stops] == [True]
    assert await outcomes(memory) == ["unknown"]
    assert len(bank.tried) == 1


async def test_a_result_that_cannot_be_written_counts_if_the_commit_comes(
    bank: Bank, memory: SessionStore, clock: FakeClock
) -> None:
    disk = Mortal(memory)

    async def full(name: str, *args: Any) -> None:
        if name == "journal_put" and args[1].state == "done":
            raise StoreDataError("The disk is full.")

    disk.before = full
    async with engine_on(disk, clock) as engine:
        assert (await engine.run("PayFlow", "fail")).message == "fail ok"
    assert await journal(memory) == []


# -- closing


class BrokenStep(PayStep):
    id = "PayStep"

    async def on_restore(self) -> None:
        raise ValueError("the new version is broken")


class BrokenFlow(PayFlow):
    id = "PayFlow"

    def define_steps(self) -> list[Step[Any, Any]]:
        return [BrokenStep(self)]


@pytest.mark.parametrize(("beyond", "second"), [(0, "unknown"), (2, "ok")])
async def test_a_turn_that_another_process_has_to_close_keeps_its_effects(
    bank: Bank, store: SessionStore, clock: FakeClock, beyond: int, second: str
) -> None:
    """The one that recovers it fails before it comes to the calls."""
    at = await points_until("fail, retry, ask", "retry") + beyond
    assert await live(bank, store, clock, Life(at), "fail, retry, ask") is None
    result = await live(bank, store, clock, Life(), None, BrokenFlow)
    assert result is not None
    assert not result.success
    assert await outcomes(store) == ["ok", second, "not_run"]
    assert await state(store) == {"fail": "0::0"} | ({"retry": "0::1"} if second == "ok" else {})
    assert len(bank.tried) == 2
    assert await journal(store) == []


@pytest.mark.parametrize(("beyond", "outcome"), [(0, "unknown"), (2, "ok")])
async def test_a_set_of_calls_that_another_process_has_to_close_is_one_effect(
    bank: Bank, memory: SessionStore, clock: FakeClock, beyond: int, outcome: str
) -> None:
    at = await points_until("give, take", "both") + beyond
    assert await live(bank, memory, clock, Life(at), "give, take") is None
    assert await live(bank, memory, clock, Life(), None, BrokenFlow) is not None
    assert await outcomes(memory) == [outcome, outcome]
    assert await state(memory) == ({"both": "0::0"} if outcome == "ok" else {})


async def test_a_turn_is_not_closed_by_who_cannot_read_its_journal(
    bank: Bank, memory: SessionStore, clock: FakeClock
) -> None:
    at = await points_until("fail, retry", "fail") + 2
    await live(bank, memory, clock, Life(at), "fail, retry")
    disk = Mortal(memory)

    async def unreadable(name: str, *args: Any) -> None:
        if name == "journal_load":
            raise StoreDataError("The disk is broken.")

    disk.before = unreadable
    [session], _ = await memory.list()
    async with engine_on(disk, clock) as engine:
        assert not (await engine.recover(session.id)).success
    assert await outcomes(memory) == []
    result = await live(bank, memory, clock, Life(), None)
    assert result is not None
    assert result.message == "fail ok, retry ok"
    assert len(bank.of("fail")) == 1


async def test_a_tool_that_is_gone_in_the_next_version_keeps_what_it_did(
    bank: Bank, memory: SessionStore, clock: FakeClock
) -> None:
    class Plain(Step):
        id = "PayStep"

        def get_prompt(self) -> str:
            return "Pay."

        @tool
        async def ask(self) -> str:
            """No effect any more."""
            raise AssertionError("it would run again")

    class PlainFlow(PayFlow):
        id = "PayFlow"

        def define_steps(self) -> list[Step[Any, Any]]:
            return [Plain(self)]

    at = await points_until("fail, ask", "ask")
    await live(bank, memory, clock, Life(at), "fail, ask")
    result = await live(bank, memory, clock, Life(), None, PlainFlow)
    assert result is not None
    assert result.message == "fail ok, ask unknown"
    assert len(bank.tried) == 2


# -- definitions


def refused(step: type[Step]) -> str:
    class BadFlow(PayFlow):
        def define_steps(self) -> list[Step[Any, Any]]:
            return [step(self)]

    with pytest.raises(FlowDefinitionError) as caught:
        Engine([BadFlow], models={"scripted": ScriptedModel()})
    return str(caught.value)


def test_on_unknown_belongs_to_effects() -> None:
    async def pay(self: Step) -> None: ...

    with pytest.raises(FlowDefinitionError, match="is no effect"):
        tool(on_unknown="retry")(pay)
    with pytest.raises(FlowDefinitionError, match="is no effect"):
        tools("a", on_unknown="retry")(pay)
    with pytest.raises(FlowDefinitionError, match="on_unknown of tool pay is retry, ask, fail"):
        tool(effect=True, on_unknown="again")(pay)  # type: ignore[call-overload]
    with pytest.raises(FlowDefinitionError, match="belongs to one call"):
        tools("a", "b", effect=True, on_unknown="ask")(pay)
    with pytest.raises(FlowDefinitionError, match="on the client"):
        tool(effect=True, client=True)(pay)


def test_a_set_with_an_effect_in_it_is_one() -> None:
    class Hides(Step):
        @tool(effect=True)
        async def pay(self) -> None:
            """Pay."""

        @tools("pay")
        async def quietly(self, calls: Any) -> None: ...

    assert "add effect=True to @tools" in refused(Hides)


def test_a_step_that_overrides_run_has_no_effects() -> None:
    class Runs(PayStep):
        async def run(self, user_message: str | None = None) -> Any:
            return await super().run(user_message)

    assert "overrides run" in refused(Runs)


async def test_any_tool_may_say_that_nothing_was_done(memory: SessionStore, clock: FakeClock) -> None:
    class Shy(Step):
        @tool(on_error="raise")
        def look(self) -> None:
            """In a thread."""
            raise NotDone("it is dark")

    class ShyFlow(PayFlow):
        def define_steps(self) -> list[Step[Any, Any]]:
            return [Shy(self)]

    model = ScriptedModel([Reply.tool_call("look"), "Then not."])
    async with TurnHarness(ShyFlow, model=model, store=memory, clock=clock) as talk:
        assert (await talk.say("look")).success
    last = model.requests[1].messages[-1]
    assert isinstance(last, ToolResult)
    assert (last.outcome, last.content) == ("not_run", {"error": "Nothing was done: it is dark"})
