"""What the parts of the store conformance suite share."""

from __future__ import annotations

import functools
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar

from stepwell.messages import UserMessage, encode_message
from stepwell.sessions import (
    Commit,
    Lease,
    NewMessage,
    SessionHead,
    SessionStore,
    StageRecord,
    TurnRecord,
    VisitRecord,
    WorkflowRecord,
)

from ._clock import FakeClock

__all__ = ["OTHER", "OWNER", "TTL", "StoreSuite", "create_session", "make_head", "make_row", "raises"]

E = TypeVar("E", bound=BaseException)

OWNER = "host:boot:1:1"
OTHER = "host:boot:2:2"
TTL = 15.0


class Caught(list[E]):
    """What `raises` caught."""

    @property
    def error(self) -> E:
        return self[0]


@contextmanager
def raises(kind: type[E]) -> Generator[Caught[E]]:
    """Expect an exception of this very class: a subclass would make callers do something else."""
    caught: Caught[E] = Caught()
    try:
        yield caught
    except kind as error:
        caught.append(error)
    if caught and type(caught.error) is kind:
        return
    raise AssertionError(f"{kind.__name__} was not raised, but {caught or 'nothing'}")


def make_head(
    session: str = "s", *, flow: str = "Flow", state: Any = None, turn: bool = False, **fields: Any
) -> SessionHead:
    """Make a small head, with `state` in stage A and an open turn if there is to be one."""
    workflow = fields.pop("workflow", None) or WorkflowRecord(flow, current="A")
    head = SessionHead(session, workflow, created_at=1.5, saved_at=2.5, **fields)
    if state is not None:
        head.stages["A"] = StageRecord(state={"value": state})
    if turn:
        head.turn = TurnRecord("run", "invocation", VisitRecord("A"))
    return head


def make_row(position: int, text: str = "", ns: str = "A") -> NewMessage:
    """Make a row with a user's message."""
    return NewMessage(
        ns, position, encode_message(UserMessage(id=f"A|t|{position}", content=text or f"text {position}"))
    )


async def create_session(store: SessionStore, session: str = "s", **fields: Any) -> Lease:
    """Create a session with the head that `make_head` makes of `fields`, leased to `OWNER`."""
    return (await store.create(Commit(head=make_head(session, **fields)), owner=OWNER, ttl=TTL)).lease


class StoreSuite:
    """What the tests of a store may ask of its author; see `SessionStoreConformance`.

    Attributes:
        large_bytes: Size of the large state; a store with a limit of its own may lower it.
        growth_turns: Turns of the growth test.
    """

    large_bytes: ClassVar[int] = 10_000_000
    growth_turns: ClassVar[int] = 1_000

    @functools.cached_property
    def clock(self) -> FakeClock:
        """The clock of this test, for stores that take one."""
        return FakeClock()

    async def advance(self, seconds: float) -> None:
        """Let time pass for the store. A store with a clock of its own (a database's) overrides it."""
        await self.clock.advance(seconds)

    async def stored_bytes(self, store: SessionStore) -> int | None:
        """How many bytes the store takes, if it can tell; the growth test compares two answers."""
        return None
