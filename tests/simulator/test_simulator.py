"""Random schedules of crashes, stalls, lost messages and late clients, and the rules without which they would break it.

Each schedule is a seed; one that fails is played again by `World(seed).run()`.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Generator
from typing import Any

import pytest

from simulator_kit import World
from stepwell.channels import memory
from stepwell.engine import _ids, _publication, _turn
from stepwell.engine._hold import Hold
from stepwell.engine._journal import Journal
from stepwell.engine._publication import Publication
from stepwell.engine._turn import TurnTask
from stepwell.errors import StaleWriterError
from stepwell.sessions import Acquired

SCHEDULES = 1_200
TO_BREAK = 1_500
"""Schedules within which a rule that is reversed must show."""


@pytest.fixture(autouse=True)
def _quiet() -> Generator[None]:
    """What goes wrong in thousands of schedules is not what a log is for."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def play(count: int, first: int = 0, *, stop: bool = False, **world: bool) -> tuple[dict[int, list[str]], Counter[str]]:
    """What went wrong, by seed, and how often things happened."""
    bad: dict[int, list[str]] = {}
    counts: Counter[str] = Counter()
    for seed in range(first, first + count):
        played = World(seed, **world).run()
        counts += played.counts
        if played.bad:
            bad[seed] = played.bad
            if stop:
                break
    return bad, counts


@pytest.mark.timeout(180)
def test_every_schedule_ends_with_what_is_stored_shown_once_on_every_client() -> None:
    bad, counts = play(SCHEDULES)
    assert not bad, f"seeds {sorted(bad)[:10]}: {next(iter(bad.values()))[0]}"
    # That it was no walk in the park.
    assert counts["crashes"] > SCHEDULES
    assert counts["lost answers"] > SCHEDULES / 4


@pytest.mark.timeout(180)
def test_every_turn_that_waits_gets_its_answers_and_ends() -> None:
    """Approvals and tools of clients: answered in any order, some twice, expired, and in the middle of crashes."""
    bad, counts = play(SCHEDULES // 2, waits=True)
    assert not bad, f"seeds {sorted(bad)[:10]}: {next(iter(bad.values()))[0]}"
    assert counts["answers"] > SCHEDULES
    assert counts["paid"] > SCHEDULES / 2


@pytest.mark.timeout(180)
def test_no_effect_happens_twice_and_the_record_says_what_happened() -> None:
    bad, counts = play(SCHEDULES // 3, effects=True)
    assert not bad, f"seeds {sorted(bad)[:10]}: {next(iter(bad.values()))[0]}"
    assert counts["charge ok"] > SCHEDULES / 3
    assert counts["charge unknown"] > SCHEDULES / 30
    assert counts["answers"] > SCHEDULES / 400


def test_a_seed_is_always_the_same_schedule() -> None:
    first, second = (World(seed=7).run() for _ in range(2))
    assert (first.steps, first.counts) == (second.steps, second.counts)


# -- each rule, reversed


def no_fence(patch: pytest.MonkeyPatch) -> None:
    """A process that lost its lease goes on writing."""

    async def fence(self: TurnTask, session: str) -> None:
        self._writer = await self._core.writer(session, self._hold.epoch, self._fenced)
        assert self._writer is not None
        self._writer._epoch = None

    patch.setattr(TurnTask, "_fence", fence)


def end_before_it_is_said(patch: pytest.MonkeyPatch) -> None:
    """The turn record is cleared by the last unit's commit, and the run's end is published behind it."""
    end, publish = TurnTask._end, Publication.end

    async def record(self: TurnTask, turn: Any, result: Any) -> None:
        return None

    async def late(self: TurnTask, result: Any) -> Any:
        publication, turn = self._publication, self.working.turn
        self._publication = None
        result = await end(self, result)
        self._publication = publication
        publication.turn = turn
        await publish(publication, "complete" if result.success else "error", "")
        return result

    patch.setattr(TurnTask, "_close_record", record)
    patch.setattr(TurnTask, "_end", late)


def settle_before_the_commit(patch: pytest.MonkeyPatch) -> None:
    """What is shown is settled first, and committed behind it."""
    commit = TurnTask._commit

    async def first(self: TurnTask, **options: Any) -> None:
        if self._publication is not None and self.working.head.turn is not None:
            await self._publication.settle()
        await commit(self, **options)

    patch.setattr(TurnTask, "_commit", first)


def ids_of_its_own(patch: pytest.MonkeyPatch) -> None:
    """What recovery says again has other ids than what was said before."""
    run_start, step_start, outputs = _publication.run_start, _publication.step_start, _publication.Outputs

    def run(*args: Any, idempotency_id: str | None = None, **options: Any) -> Any:
        return run_start(*args, idempotency_id=_ids.new_id(), **options)

    def step(*args: Any, idempotency_id: str | None = None) -> Any:
        return step_start(*args, idempotency_id=_ids.new_id())

    patch.setattr(_publication, "run_start", run)
    patch.setattr(_publication, "step_start", step)
    patch.setattr(_publication, "Outputs", lambda writer, scope: outputs(writer, _ids.new_id()))


def serial_without_acknowledgement(patch: pytest.MonkeyPatch) -> None:
    """An attempt counts as shown although its last words are still on their way."""

    async def at_once(self: Any, patience: float) -> str | None:
        self.finish("complete")
        self._queue.clear()
        return self._serial

    patch.setattr(_publication._Attempt, "acknowledged", at_once)


def dead_text_stays(patch: pytest.MonkeyPatch) -> None:
    """A unit that shows nothing in the end leaves alone what its attempts showed."""
    settle = Publication.settle

    async def only_what_is_shown(self: Publication, last: Any = None) -> None:
        self.turn.outs = [out for out in self.turn.outs if out.parts or out.start is not None]
        await settle(self, last)

    patch.setattr(Publication, "settle", only_what_is_shown)


def read_before_the_lease(patch: pytest.MonkeyPatch) -> None:
    """What a process has of a session is used, whatever happened to it elsewhere."""
    acquire = Hold.acquire

    async def early(self: Hold, session: str, warm: Any, supersede: Any) -> Any:
        acquired = await acquire(self, session, warm, supersede)
        if warm is None:
            return acquired
        warm.working.head.revision = acquired.revision
        return Acquired(acquired.lease, acquired.revision, None, acquired.inbox)

    patch.setattr(Hold, "acquire", early)


def append_without_a_number(patch: pytest.MonkeyPatch) -> None:
    """An append that is repeated is applied again."""
    append = memory.MemoryChannel.append

    async def again(self: Any, serial: str, *args: Any, seq: int, epoch: int | None = None) -> str:
        applied = self._message(self._fenced(epoch), serial).applied
        return await append(self, serial, *args, seq=applied + 1, epoch=epoch)

    patch.setattr(memory.MemoryChannel, "append", again)


def rest_before_it_is_said(patch: pytest.MonkeyPatch) -> None:
    """A turn that waits is stored as one before the channel shows it."""
    commit = TurnTask._commit

    async def early(self: TurnTask, **options: Any) -> None:
        head = self.working.head
        if head.turn is not None and head.turn.phase == "suspended":
            head.status = "suspended"
        await commit(self, **options)

    patch.setattr(TurnTask, "_commit", early)


def waiting_with_ids_of_its_own(patch: pytest.MonkeyPatch) -> None:
    """What is said again of a run that waits or goes on has other ids than before."""
    for name in ("run_suspend", "run_resume"):
        make = getattr(_publication, name)

        def made(*args: Any, make: Any = make, idempotency_id: str | None = None) -> Any:
            return make(*args, idempotency_id=_ids.new_id())

        patch.setattr(_publication, name, made)


def forgotten_by_the_next_commit(patch: pytest.MonkeyPatch) -> None:
    """The answers are dropped when the run goes on, not when the unit that uses them is committed."""
    go_on = _turn.go_on

    def early(turn: Any, *args: Any) -> None:
        go_on(turn, *args)
        turn.pending = ()

    patch.setattr(_turn, "go_on", early)


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "reverse",
    [rest_before_it_is_said, waiting_with_ids_of_its_own, forgotten_by_the_next_commit],
    ids=lambda reverse: reverse.__name__,
)
def test_a_rule_of_waiting_that_is_reversed_shows(reverse: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    reverse(monkeypatch)
    bad, _ = play(TO_BREAK, stop=True, waits=True)
    assert bad, f"{reverse.__name__}: {reverse.__doc__} Nobody would notice."


def nothing_is_said_before(patch: pytest.MonkeyPatch) -> None:
    """An effect begins, and its intent is not in the journal."""

    async def intend(self: Journal, calls: Any, attempt: int) -> None:
        return None

    patch.setattr(Journal, "intend", intend)


def journal_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    """Whoever takes a turn up runs its calls as if nobody had begun."""

    async def load(self: Journal, calls: Any) -> None:
        self.unread = False

    patch.setattr(Journal, "load", load)


def begins_without_the_lease(patch: pytest.MonkeyPatch) -> None:
    """An effect begins although somebody else has taken the session over."""
    intend = Journal.intend

    async def whatever(self: Journal, calls: Any, attempt: int) -> None:
        try:
            await intend(self, calls, attempt)
        except StaleWriterError:
            return

    patch.setattr(Journal, "intend", whatever)


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "reverse",
    [nothing_is_said_before, journal_is_forgotten, begins_without_the_lease],
    ids=lambda reverse: reverse.__name__,
)
def test_a_rule_of_effects_that_is_reversed_shows(reverse: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    reverse(monkeypatch)
    bad, _ = play(TO_BREAK, stop=True, effects=True)
    assert bad, f"{reverse.__name__}: {reverse.__doc__} Nobody would notice."


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    "reverse",
    [
        no_fence,
        end_before_it_is_said,
        settle_before_the_commit,
        ids_of_its_own,
        serial_without_acknowledgement,
        dead_text_stays,
        read_before_the_lease,
        append_without_a_number,
    ],
    ids=lambda reverse: reverse.__name__,
)
def test_a_rule_that_is_reversed_shows(reverse: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    reverse(monkeypatch)
    bad, _ = play(TO_BREAK, stop=True)
    assert bad, f"{reverse.__name__}: {reverse.__doc__} Nobody would notice."
