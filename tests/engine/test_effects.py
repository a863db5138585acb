"""Effects: never twice, whoever dies between the intent and the commit; of the rest `on_unknown` decides."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest

from effect_kit import Bank, Life, Mortal, PayFlow, PayStep, engine_on, journal, live, state, stored
from stepwell import Step, ToolContext, tool
from stepwell.sessions import MemoryStore, SessionStore, open_store
from stepwell.testing import FakeClock

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
    assert content == {"error": "This call was interrupted. Whether it had an effect is unknown. Do not repeat it."}
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
            seen.append(self.get_state().get("fail"))
            self.bank.life.point()
            return "seen"

    class ReadsFlow(PayFlow):
        id = "PayFlow"

        def define_steps(self) -> list[Step[Any, Any]]:
            return [Reads(self)]

    at = await points_until("fail, look", "fail") + 4
    assert await live(bank, memory, clock, Life(at), "fail, look", ReadsFlow) is None
    result = await live(bank, memory, clock, Life(), None, ReadsFlow)
    assert result is not None
    assert seen == ["0::0", "0::0"]
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


# -- any crash


BATCH = "fail, look, retry, decline, ask, boom"


async def settled(bank: Bank, store: SessionStore, clock: FakeClock, deaths: list[int], text: str = BATCH) -> None:
    """Processes one after the other, each to its death, and one that lives; then everything is as it must be."""
    said: str | None = text
    for at in deaths:
        if await live(bank, store, clock, Life(at), said) is not None:
            break
        if (await store.list())[0]:
            said = None
    [session], _ = await store.list() if (await store.list())[0] else ([None], None)
    if session is None:
        return
    result = await live(bank, store, clock, Life(), None)
    assert result is not None
    if result.pending:
        async with engine_on(store, clock) as engine:
            result = await engine.answer(session.id, result.pending[0].id, "asked")
    assert result.success
    found = await stored(store)
    assert set(found) == set(text.split(", "))
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
    assert (await store.load(session.id))[0].turn is None


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
        await settled(bank, MemoryStore(clock), clock, [at])


async def test_however_often_processes_die_nothing_is_charged_twice(clock: FakeClock) -> None:
    import random

    dice = random.Random(4)
    points = await points_of(BATCH)
    for _ in range(300):
        bank = PayStep.bank = Bank()
        await settled(bank, MemoryStore(clock), clock, [dice.randrange(1, points) for _ in range(dice.randrange(1, 5))])
