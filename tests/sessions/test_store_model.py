"""Random histories of calls: every store must answer as a small model does, after every step."""

import asyncio
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from stepwell.errors import (
    LeaseHeldError,
    SessionConflictError,
    SessionExistsError,
    StaleWriterError,
    StepwellError,
    StoreError,
    UnknownSessionError,
)
from stepwell.messages import decode_message
from stepwell.sessions import (
    Commit,
    DueSession,
    InboxRow,
    InboxUpdate,
    JournalRow,
    Lease,
    LogEntry,
    MemoryStore,
    SequenceEntry,
    SessionStore,
    SqliteStore,
)
from stepwell.sessions.postgres import PostgresStore
from stepwell.testing import FakeClock
from stepwell.testing._store_base import make_head, make_row

IDS = st.sampled_from(["a", "b", "c"])
OWNERS = st.sampled_from(["p", "q"])
NAMES = st.sampled_from(["x", "y", "z"])
KEYS = st.sampled_from(["k1", "k2", "k10", "other"])
JOURNAL = st.sampled_from(["intent", "done", "refused", "unknown"])
STATES = st.sampled_from(["new", "taken", "done"])


@dataclass
class Row:
    """What the model knows of one session."""

    revision: int
    epoch: int
    incarnation: str
    owner: str | None
    expires: float
    head: Any
    messages: dict[str, dict[int, bytes]] = field(default_factory=dict)
    sequence: list[SequenceEntry] = field(default_factory=list)
    log: list[LogEntry] = field(default_factory=list)
    inbox: dict[str, InboxRow] = field(default_factory=dict)
    journal: dict[str, JournalRow] = field(default_factory=dict)


@st.composite
def commits(draw: st.DrawFn) -> Commit:
    head = make_head(
        state=draw(st.none() | st.integers() | st.text(max_size=5)),
        turn=draw(st.booleans()),
        status=draw(st.sampled_from(["running", "suspended", "completed"])),
        flow=draw(st.sampled_from(["F", "G"])),
    )
    if head.turn is not None:
        head.turn.expires = draw(st.none() | st.sampled_from([0.5, FakeClock.START + 20.0, 1e12]))
    return Commit(
        head=head,
        messages=draw(st.lists(st.builds(make_row, st.integers(0, 12), st.text(max_size=3), NAMES), max_size=3)),
        first=draw(st.dictionaries(NAMES, st.integers(0, 8), max_size=1)),
        sequence=draw(st.lists(st.builds(SequenceEntry, NAMES, st.floats(0, 1e9), st.integers(0, 2)), max_size=2)),
        log=draw(st.lists(st.builds(LogEntry, st.just("info"), st.floats(0, 1e9), st.text(max_size=5)), max_size=2)),
        inbox=draw(
            st.lists(
                st.builds(InboxUpdate, KEYS, STATES, st.none() | st.binary(max_size=3))
                | st.builds(InboxRow, KEYS, st.sampled_from(["input", "cancel"]), st.binary(max_size=3), STATES),
                max_size=2,
            )
        ),
        clear_journal=draw(st.none() | st.sampled_from(["", "k1", "k", "none"])),
        journal=draw(st.lists(st.builds(JournalRow, KEYS, JOURNAL, st.binary(max_size=3)), max_size=2)),
        release=draw(st.booleans()),
    )


class StoreMachine(RuleBasedStateMachine):
    """The model, and the calls that are made on it and on a store."""

    full: ClassVar[bool] = False

    def open(self) -> SessionStore:
        raise NotImplementedError

    @initialize()
    def begin(self) -> None:
        self.runner = asyncio.Runner()
        self.clock = FakeClock()
        self.rows: dict[str, Row] = {}  # in order of creation
        self.leases: list[Lease] = []
        self.store = self.open()

    def teardown(self) -> None:
        if hasattr(self, "runner"):
            self.runner.run(self.store.close())
            self.runner.close()

    def call(self, coroutine: Any, expected: type[StepwellError] | None = None) -> Any:
        async def call() -> Any:
            return await coroutine

        if expected is None:
            return self.runner.run(call())
        with pytest.raises(expected) as caught:
            self.runner.run(call())
        assert caught.type is expected
        return None

    # --- the model --------------------------------------------------------------------------------------------------

    def current(self, lease: Lease) -> Row | None:
        row = self.rows.get(lease.session)
        if row is None or row.incarnation != lease.incarnation or row.epoch != lease.epoch or row.owner is None:
            return None
        return row

    def fits(self, row: Row, commit: Commit) -> bool:
        seen: set[tuple[str, int]] = set()
        for message in commit.messages:
            at = (message.ns, message.position)
            if at in seen or message.position in row.messages.get(message.ns, {}):
                return False
            seen.add(at)
        return True

    def apply(self, row: Row, commit: Commit) -> None:
        for message in commit.messages:
            row.messages.setdefault(message.ns, {})[message.position] = message.data
        for ns, first in commit.first.items():
            kept = {at: data for at, data in row.messages.get(ns, {}).items() if at >= first}
            row.messages[ns] = kept
        row.sequence += commit.sequence
        row.log += commit.log
        for change in commit.inbox:
            old = row.inbox.get(change.key)
            if isinstance(change, InboxRow):
                row.inbox.setdefault(change.key, change)
            elif old is not None:
                row.inbox[change.key] = InboxRow(old.key, old.kind, old.payload, change.state, change.result)
        if commit.clear_journal is not None:
            row.journal = {k: v for k, v in row.journal.items() if not k.startswith(commit.clear_journal)}
        for entry in commit.journal:
            row.journal[entry.key] = entry
        row.head = commit.head
        if commit.release:
            row.owner = None

    # --- the calls --------------------------------------------------------------------------------------------------

    @rule(session=IDS, owner=OWNERS, commit=commits())
    def create(self, session: str, owner: str, commit: Commit) -> None:
        commit.head.id = session
        call = self.store.create(commit, owner=owner, ttl=10)
        if session in self.rows:
            self.call(call, SessionExistsError)
            return
        row = Row(1, 1, "", owner, self.clock.time() + 10, None)
        if not self.fits(row, commit):
            self.call(call, StoreError)
            return
        acquired = self.call(call)
        row.incarnation = acquired.lease.incarnation
        self.apply(row, commit)
        self.rows[session] = row
        self.leases.append(acquired.lease)
        assert list(acquired.inbox) == [entry for entry in row.inbox.values() if entry.state != "done"]

    @rule(session=IDS, owner=OWNERS, ttl=st.sampled_from([5, 20]), known=st.booleans(), supersede=st.none() | OWNERS)
    def acquire(self, session: str, owner: str, ttl: int, known: bool, supersede: str | None) -> None:
        row = self.rows.get(session)
        options: dict[str, Any] = {"supersede": supersede}
        if known and row is not None:
            options |= {"known_revision": row.revision, "known_incarnation": row.incarnation}
        call = self.store.acquire(session, owner, ttl=ttl, **options)
        if row is None:
            self.call(call, UnknownSessionError)
            return
        now = self.clock.time()
        if row.owner not in (None, owner, supersede) and row.expires > now:
            self.call(call, LeaseHeldError)
            return
        acquired = self.call(call)
        row.epoch, row.owner, row.expires = row.epoch + 1, owner, now + ttl
        assert acquired.lease == Lease(session, row.incarnation, row.epoch, owner, row.expires)
        assert acquired.revision == row.revision
        assert (acquired.head is None) == known
        assert list(acquired.inbox) == [entry for entry in row.inbox.values() if entry.state != "done"]
        self.leases.append(acquired.lease)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), commit=commits(), behind=st.sampled_from([0, 0, 0, 1]))
    def save(self, data: st.DataObject, commit: Commit, behind: int) -> None:
        lease = data.draw(st.sampled_from(self.leases[-4:]))
        row = self.current(lease)
        found = self.rows.get(lease.session)
        expected = (found.revision if found else 1) - behind
        commit.head.id = lease.session
        call = self.store.save(lease, commit, expected)
        if row is None:
            self.call(call, StaleWriterError)
        elif behind:
            self.call(call, SessionConflictError)
        elif not self.fits(row, commit):
            self.call(call, StoreError)
        else:
            assert self.call(call) == expected + 1
            row.revision += 1
            self.apply(row, commit)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), key=KEYS, state=JOURNAL)
    def journal(self, data: st.DataObject, key: str, state: Any) -> None:
        lease = data.draw(st.sampled_from(self.leases[-4:]))
        row = self.current(lease)
        entry = JournalRow(key, state, b"{}")
        self.call(self.store.journal_put(lease, entry), None if row else StaleWriterError)
        if row:
            row.journal[key] = entry

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.leases[-4:]))
        row = self.current(lease)
        renewed = self.call(self.store.renew(lease, ttl=10), None if row else StaleWriterError)
        if row:
            row.expires = self.clock.time() + 10
            assert renewed == Lease(lease.session, lease.incarnation, lease.epoch, lease.owner, row.expires)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.leases[-4:]))
        self.call(self.store.release(lease))
        if row := self.current(lease):
            row.owner = None

    @rule(session=IDS, row=st.builds(InboxRow, KEYS, st.just("input"), st.binary(max_size=3)))
    def inbox_put(self, session: str, row: InboxRow) -> None:
        found = self.rows.get(session)
        answer = self.call(self.store.inbox_put(session, row), None if found else UnknownSessionError)
        if found:
            assert answer == found.inbox.setdefault(row.key, row)

    @rule(session=IDS, key=KEYS)
    def inbox_withdraw(self, session: str, key: str) -> None:
        found = self.rows.get(session)
        gone = self.call(self.store.inbox_withdraw(session, key), None if found else UnknownSessionError)
        if found:
            entry = found.inbox.get(key)
            assert gone == (entry is not None and entry.state == "new")
            if gone:
                del found.inbox[key]

    @rule(session=IDS)
    def delete(self, session: str) -> None:
        assert self.call(self.store.delete(session)) == (self.rows.pop(session, None) is not None)

    @rule(seconds=st.sampled_from([1, 6, 30]))
    def wait(self, seconds: int) -> None:
        self.call(self.clock.advance(seconds))

    @rule()
    def open_again(self) -> None:
        self.reopen()

    def reopen(self) -> None:
        """A store that keeps what it has is closed and opened."""

    # --- what must be so --------------------------------------------------------------------------------------------

    @invariant()
    def same(self) -> None:
        if not hasattr(self, "store"):
            return
        for session, row in self.rows.items():
            head, lease = self.call(self.store.load(session))
            row.head.revision = row.revision
            assert head == row.head
            held = None
            if row.owner is not None:
                held = Lease(session, row.incarnation, row.epoch, row.owner, row.expires)
            assert lease == held
            for ns in ("x", "y", "z"):
                stored = self.call(self.store.load_messages(session, ns))
                rows = sorted(row.messages.get(ns, {}).items())
                assert [(each.position, each.message) for each in stored] == [
                    (at, decode_message(data)) for at, data in rows
                ]
            assert self.call(self.store.load_sequence(session)) == row.sequence
            assert self.call(self.store.load_log(session)) == row.log
            assert self.call(self.store.inbox_list(session)) == list(row.inbox.values())
            assert self.call(self.store.journal_load(session)) == list(row.journal.values())
            assert self.call(self.store.journal_load(session, "k1")) == [
                entry for entry in row.journal.values() if entry.key.startswith("k1")
            ]
        listed, cursor = self.call(self.store.list())
        assert cursor is None
        assert [(each.id, each.revision, each.flow, each.status) for each in listed] == [
            (session, row.revision, row.head.workflow.id, row.head.status)
            for session, row in reversed(self.rows.items())
        ]
        assert self.call(self.store.due()) == self.due()

    def due(self) -> list[DueSession]:
        found: list[DueSession] = []
        for session, row in self.rows.items():
            fresh = any(entry.state == "new" for entry in row.inbox.values())
            turn = row.head.turn
            if turn is None and not fresh:
                continue
            if row.owner is None:
                until = turn.expires if turn and not fresh and row.head.status == "suspended" else 0.0
                if until is not None and until <= self.clock.time():
                    found.append(DueSession(session, "", until))
            elif row.expires <= self.clock.time():
                found.append(DueSession(session, row.owner, row.expires))
        return sorted(found, key=lambda each: (each.expires, each.session))


class MemoryMachine(StoreMachine):
    def open(self) -> SessionStore:
        return MemoryStore(self.clock)


class SqliteMachine(StoreMachine):
    def open(self) -> SessionStore:
        if not hasattr(self, "directory"):
            self.directory = tempfile.TemporaryDirectory()
        mode = "full" if self.full else "normal"
        return SqliteStore(Path(self.directory.name) / "store.db", synchronous=mode, clock=self.clock)

    def reopen(self) -> None:
        self.runner.run(self.store.close())
        self.store = self.open()

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "directory"):
            self.directory.cleanup()


class SqliteFullMachine(SqliteMachine):
    full = True


class PostgresMachine(StoreMachine):
    url: ClassVar[str]

    def open(self) -> SessionStore:
        return PostgresStore(self.url, clock=self.clock)

    def reopen(self) -> None:
        self.runner.run(self.store.close())
        self.store = self.open()

    def teardown(self) -> None:
        if hasattr(self, "runner"):
            for session in self.rows:
                self.call(self.store.delete(session))
        super().teardown()


# No database of examples: what fails is printed, and nothing is written beside the tests. No explain phase: it traces
# every line, which takes minutes.
SETTINGS = settings(
    max_examples=30,
    stateful_step_count=30,
    deadline=None,
    database=None,
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
)
MemoryMachine.TestCase.settings = settings(SETTINGS, max_examples=40)
SqliteMachine.TestCase.settings = SETTINGS
SqliteFullMachine.TestCase.settings = settings(SETTINGS, max_examples=8)

PostgresMachine.TestCase.settings = settings(SETTINGS, max_examples=15)

TestMemoryModel = MemoryMachine.TestCase
TestSqliteModel = SqliteMachine.TestCase
TestSqliteFullModel = SqliteFullMachine.TestCase


class TestPostgresModel(PostgresMachine.TestCase):
    @pytest.fixture(autouse=True)
    def database(self, postgres_database: str) -> None:
        PostgresMachine.url = postgres_database
