"""The journal of a turn's effects: rows on disk, written on their own before and after each, outside of commits.

A row goes with the commit that stores its call's result. What a process that died left behind is read once, when its
turn is taken up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import msgspec
from anyio import CancelScope

from stepwell.errors import RaceError, StoreBusyError, StoreError
from stepwell.loop import CallScope, EffectState, Recorded
from stepwell.messages import JsonValue, Message, ToolCall
from stepwell.outcomes import Direct, DirectTo, Finish, Go, Outcome, Stay, Suspend, SuspendRequest
from stepwell.sessions import JournalRow

from ._hold import Hold
from ._working import Scope, Working

__all__ = ["Journal"]

_KINDS: dict[str, type[Outcome]] = {kind.__name__: kind for kind in (Stay, Go, Direct, DirectTo, Finish, Suspend)}


class _StoredOutcome(msgspec.Struct, omit_defaults=True):
    """An outcome, without its cleanup, which dies with its process."""

    kind: str = "Stay"
    target: str | None = None
    content: JsonValue = None
    feedback: JsonValue = None
    state: dict[str, Any] | None = None
    prompt: str | None = None
    message: Message | str | None = None
    content_type: str | None = None
    messages: tuple[Message | str, ...] = ()
    request: SuspendRequest | None = None

    @classmethod
    def of(cls, outcome: Outcome) -> _StoredOutcome:
        kept = {name: getattr(outcome, name) for name in outcome.__struct_fields__ if name != "cleanup"}
        if not isinstance(kept.get("target", ""), str):
            kept["target"] = kept["target"].id
        return cls(type(outcome).__name__, **kept)

    def outcome(self) -> Outcome:
        kind = _KINDS[self.kind]
        return kind(**{name: getattr(self, name) for name in kind.__struct_fields__ if name != "cleanup"})


class _Entry(msgspec.Struct, omit_defaults=True):
    """What a row holds.

    Attributes:
        tool: The tool, for whoever reads the journal.
        attempt: How often the call was started.
        also: Keys of the other calls of a set.
        content: What the model is told.
        outcome: What the handler returned.
        writes: What it staged, in order, as in `Scope.ops`.
    """

    tool: str
    attempt: int = 1
    also: Sequence[str] = ()
    content: JsonValue = None
    outcome: _StoredOutcome = msgspec.field(default_factory=_StoredOutcome)
    writes: Sequence[Sequence[Any]] = ()


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(_Entry)


class Journal:
    """Implements `EffectJournal` for one turn.

    Args:
        working: The session.
        hold: The right to write it.
        report: Told of a row that could not be written.

    Attributes:
        unread: Whether an earlier holder of the lease may have left rows of the open turn.
    """

    __slots__ = ("_firsts", "_hold", "_prefix", "_report", "_rows", "_working", "unread")

    def __init__(self, working: Working, hold: Hold, report: Callable[[str, Exception, str], None]) -> None:
        self._working = working
        self._hold = hold
        self._report = report
        self._rows: dict[str, JournalRow] = {}
        self._firsts: dict[str, str] = {}  # of calls that are run as a set: the key of the first, which has the row
        self._prefix: str | None = None
        self.unread = False

    async def load(self, calls: Sequence[ToolCall]) -> None:
        """Read, once, what an earlier holder of the lease left of these calls of one reply.

        Raises:
            StoreError: It cannot be read; then nothing may be said of these calls.
        """
        if not self.unread or not calls:
            return
        prefix = _prefix(calls[0])
        for row in await self._working.store.journal_load(self._working.session_id, prefix):
            self._prefix = prefix
            self._rows[row.key] = row
            self._firsts.update((key, row.key) for key in _decoder.decode(row.data).also)
        self.unread = False

    def recorded(self, call: ToolCall, after: CallScope | None = None) -> Recorded | None:
        """See `EffectJournal`."""
        if not self._rows:
            return None
        first = self._firsts.get(call.key, call.key)
        row = self._rows.get(first)
        if row is None:
            return None
        entry = _decoder.decode(row.data)
        if row.state != "done":
            return Recorded(row.state, entry.attempt)
        if first != call.key:  # what the set returned and wrote counts once
            return Recorded("done", entry.attempt, entry.content)
        writes = [_restored(op) for op in entry.writes]
        scope = self._working.staged(writes, after)
        return Recorded("done", entry.attempt, entry.content, entry.outcome.outcome(), scope)

    async def intend(self, calls: Sequence[ToolCall], attempt: int) -> None:
        """See `EffectJournal`."""
        self._prefix = _prefix(calls[0])  # from here on there may be a row, whether or not the answer comes
        row = _row(calls, "intent", _entry(calls, attempt))
        await self._hold.record(row)
        self._rows[row.key] = row
        self._firsts.update((call.key, row.key) for call in calls[1:])

    async def ended(self, calls: Sequence[ToolCall], recorded: Recorded) -> None:
        """See `EffectJournal`."""
        entry = _entry(calls, recorded.attempt)
        if recorded.state == "done":
            entry.content, entry.outcome = recorded.content, _StoredOutcome.of(recorded.outcome)
            entry.writes = cast("Scope", recorded.scope).ops
        row = self._rows[calls[0].key] = _row(calls, recorded.state, entry)
        with CancelScope(shield=True) as scope:
            # A store that never answers may keep us for as long as the lease lasts, and no longer.
            timer = self._working.clock.call_at(self._hold.until, scope.cancel)
            try:
                await self._hold.record(row)
            except (StoreError, RaceError) as error:
                self._report("how an effect ended is not in the journal", error, self._working.session_id)
            finally:
                timer.cancel()
        if scope.cancelled_caught:
            error = StoreBusyError("The store gave no answer while the lease lasted.")
            self._report("how an effect ended may not be in the journal", error, self._working.session_id)

    def settle(self, calls: Sequence[ToolCall]) -> None:
        """Let the next commit, which has the results of these calls, drop their rows; those without a result stay."""
        if self._prefix is None or not calls or _prefix(calls[0]) != self._prefix:
            return
        histories = self._working.histories.values()
        waiting = {call.key for history in histories if history.check.open for call in history.open}
        kept = [row for key, row in self._rows.items() if key in waiting and key.startswith(self._prefix)]
        self._working.clear_journal(self._prefix, kept)


def _prefix(call: ToolCall) -> str:
    """What the keys of the calls of one reply begin with, and no others."""
    return call.key.rsplit(":", 2)[0] + ":"


def _entry(calls: Sequence[ToolCall], attempt: int) -> _Entry:
    return _Entry(calls[0].name, attempt, [call.key for call in calls[1:]])


def _row(calls: Sequence[ToolCall], state: EffectState, entry: _Entry) -> JournalRow:
    return JournalRow(calls[0].key, state, _encoder.encode(entry))


def _restored(op: Sequence[Any]) -> tuple[Any, ...]:
    if op[0] == "message":
        return (*op[:3], msgspec.convert(op[3], Message))
    return tuple(op)
