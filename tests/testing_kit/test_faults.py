"""The fault kit: at every point that a turn passes a process may crash, and every request and answer be lost."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from engine_flows import BookFlow, TalkFlow
from publication_kit import House, ended, shown, until
from stepwell import Engine, TurnResult
from stepwell.channels import open_channels
from stepwell.messages import UserMessage
from stepwell.models import ModelRequest
from stepwell.sessions import open_store
from stepwell.testing import CrashedError, Faults, Reply, ScriptedModel, sever

pytestmark = pytest.mark.anyio

POINTS = [
    "acquire", "acquire:done", "fence", "fence:done", "open", "open:done", "run-start", "run-start:done",
    "turn-started", "unit-started", "attempt-started", "model", "token", "token",
]  # fmt: skip
"""How each turn of `talk` begins on a session that is there, up to its first words."""


def answer(request: ModelRequest) -> Any:
    """What it says depends on the history alone, as with a real model."""
    last = request.messages[-1]
    if isinstance(last, UserMessage):
        return (
            Reply.tool_call("note", {"text": last.text}, id="n", text=["Let ", "me"]) if "note" in last.text else "Hm?"
        )
    return Reply.text(["Noted", "."])


async def converse(house: House, faults: Faults) -> tuple[TurnResult, list[list[Any]]]:
    """A turn on a session that is there, by a process with faults; whatever it leaves, another one finishes.

    Returns what came of it, and what clients show: one that was there, and one that comes when all is over.
    """
    async with house.engine(BookFlow, ScriptedModel(default=answer)) as calm:
        await house.say(calm, "hello")
        faulty = Engine(
            [BookFlow],
            models={"scripted": faults.model(ScriptedModel(default=answer, clock=house.clock))},
            store=faults.store(house.store),
            channels=faults.channels(house.channels),
            clock=house.clock,
            listeners=[faults.listen],
            recovery_interval=None,
        )
        async with house.client() as client:
            async with faulty:
                result = await faulty.run("BookFlow", "note it", session_id=house.session, idempotency_key="k")
            if not result.success:
                result = await house.say(calm, "note it", idempotency_key="k")
            await until(client, ended(result.run_id))
            late = await house.shown()
            assert shown(client) == late
    head, lease = await house.store.load(house.session)
    assert (head.turn, lease) == (None, None)
    return result, late


async def undisturbed() -> tuple[Faults, list[list[Any]]]:
    faults = Faults()
    result, late = await converse(House.in_memory(), faults)
    assert result.message == "Noted."
    return faults, late


async def test_a_turn_passes_these_points() -> None:
    faults, _ = await undisturbed()
    assert [point for point in faults.trace if point in POINTS][: len(POINTS)] == POINTS
    said = set(faults.trace)
    for request in (
        "acquire",
        "fence",
        "open",
        "run-start",
        "commit",
        "step-start",
        "step-end",
        "close",
        "run-end",
        "release",
    ):
        assert {request, f"{request}:done"} <= said
    assert {"model", "token", "model:done", "tool-started", "tool-finished", "accepted", "committed"} <= said
    order = [faults.trace.index(point) for point in ("close:done", "run-end", "run-end:done", "release")]
    assert order == sorted(order)


async def test_wherever_it_crashes_the_conversation_ends_as_if_it_had_not() -> None:
    faults, expected = await undisturbed()
    for place, point in enumerate(faults.trace):
        nth = faults.trace[: place + 1].count(point)
        crashing = Faults().crash(point, nth)
        result, late = await converse(House.in_memory(), crashing)
        assert crashing.dead, point
        assert (result.message, late) == ("Noted.", expected), f"{point}, {nth}"


@pytest.mark.parametrize("deed", ["drop", "lose_answer", "repeat", "delay"])
async def test_a_request_that_is_lost_late_or_doubled_changes_nothing(deed: str) -> None:
    faults, expected = await undisturbed()
    for place, point in enumerate(faults.trace):
        if f"{point}:done" not in faults.passed or point == "model":
            continue
        nth = faults.trace[: place + 1].count(point)
        faulty = Faults()
        options: dict[str, Any] = {"seconds": 0.0} if deed == "delay" else {}
        getattr(faulty, deed)(point, nth=nth, **options)
        result, late = await converse(House.in_memory(), faulty)
        assert not faulty.dead
        assert (result.message, late) == ("Noted.", expected), f"{deed} {point}, {nth}"


async def test_a_channel_that_is_away_for_a_while_does_not_change_a_turn() -> None:
    faulty = Faults()
    for nth in range(1, 4):
        faulty.drop("fence", nth)
        faulty.drop("run-start", nth)
        faulty.drop("step-end", nth)
        faulty.lose_answer("output", nth)
    result, late = await converse(House.in_memory(), faulty)
    _, expected = await undisturbed()
    assert (result.message, late) == ("Noted.", expected)
    assert faulty.passed["fence"] == 4


async def test_a_provider_that_stalls_is_given_up_and_asked_again() -> None:
    house = House.in_memory()
    faulty = Faults(clock=house.clock).stall(2)
    result, late = await converse(house, faulty)
    _, expected = await undisturbed()
    assert (result.message, late) == ("Noted.", expected)
    assert faulty.passed["model"] == 3


async def test_whose_lease_expired_is_a_stale_writer() -> None:
    house = House.in_memory()
    model = ScriptedModel(["Ready.", Reply.text(["one ", "two"]).stalling(after=1)])
    async with house.engine(TalkFlow, model) as engine:
        await house.say(engine, "first")
        async with engine.stream("TalkFlow", "go", session_id=house.session, detached=True) as turn:
            await model.wait_stalled()
            await Faults().expire(house.store, house.session)
        async with house.engine(TalkFlow, ScriptedModel(["All."])) as second:
            assert (await second.recover(house.session)).message == "All."
        await turn.done.wait()
        assert turn.result.error is not None
        assert turn.result.error.ids["kind"] == "lost"
    assert (await house.shown())[2:] == [["user", "go"], ["assistant", "|", "All."]]


async def test_a_point_of_ones_own_ends_with_the_process() -> None:
    faults = Faults().crash("charged", 2)
    faults.at("charged")
    for _ in range(2):
        with pytest.raises(CrashedError):
            faults.at("charged")
    with pytest.raises(CrashedError):
        await faults.store(House.in_memory().store).list()
    assert faults.passed["charged"] == 2


def test_faults_that_cannot_be_are_refused() -> None:
    with pytest.raises(ValueError, match="no request"):
        Faults().drop("commit:done")
    with pytest.raises(ValueError, match="count from 1"):
        Faults().crash("commit", 0)
    with pytest.raises(ValueError, match="token@3"):
        Faults.from_env({"STEPWELL_FAULT": "token@0"})
    assert not Faults.from_env({}).dead


def test_a_real_process_is_killed_where_its_environment_says() -> None:
    code = (
        "from stepwell.testing import Faults; f = Faults.from_env()\nfor n in range(9): print(n, flush=True); f.at('x')"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], env={"STEPWELL_FAULT": "x@3"}, capture_output=True, text=True, check=False
    )
    assert (process.returncode, process.stdout) == (-9, "0\n1\n2\n")


async def test_connections_to_servers_can_be_cut(postgres_database: str, redis_database: str) -> None:
    async with open_channels(redis_database) as channels:
        store = open_store(postgres_database)
        house = House(store, channels)
        async with house.engine(TalkFlow, ScriptedModel(["Ready.", "All there."])) as engine:
            await house.say(engine, "a")
            async with house.client() as client:
                assert await sever(postgres_database) > 0
                assert await sever(redis_database) > 0
                result = await house.say(engine, "b")
                assert result.message == "All there."
                await until(client, ended(result.run_id))
                assert shown(client) == await house.shown()
        await store.close()
    with pytest.raises(ValueError, match="redis"):
        await sever("memory://")
