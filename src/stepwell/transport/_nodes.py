"""What a conversation is made of: inputs, runs, and the steps of runs.

Everything here is a function of the set of messages seen, not of the order in which they came: lifecycle messages are
kept and read in the order of the channel, the canonical attempt of a step is the one with the greatest start serial,
and content is folded anew (when somebody looks at it) where appending to it would not do.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec

from stepwell.wire import ErrorInfo, H, Headers, RunEvent, StepEvent

from ._codec import Codec, CodecMessage, Direction, FoldMeta
from ._log import Attempt, EventLog, Recorded

__all__ = ["InputNode", "Node", "Place", "RunInfo", "RunNode", "StepInfo"]

M = TypeVar("M")
P = TypeVar("P")

_by_serial = attrgetter("serial")

Place: TypeAlias = tuple[str | None, tuple[bool, str, int]]
"""The parent, and what nodes are ordered by: those that are only here come last."""


class StepInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A step of a run.

    Attributes:
        step_id: Its id; the same for all attempts.
        status: Of the canonical attempt: `active`, or the reason of its end: `complete`, `failed`, `cancelled`.
        attempt_count: Attempts seen.
        step_client_id: Who takes part in the step, by its canonical attempt; None before a start was seen.
    """

    step_id: str
    status: str
    attempt_count: int
    step_client_id: str | None


class RunInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A run as it is now.

    Attributes:
        run_id: Its id.
        client_id: Its owner; empty if nobody said.
        invocation_id: The first invocation; empty if nobody said.
        steps: In the order in which they appeared on the channel.
        status: `active`, `suspended`, `complete`, `cancelled`, `error`, or another reason that the agent gave.
        error: With status `error`.
    """

    run_id: str
    client_id: str
    invocation_id: str
    steps: tuple[StepInfo, ...]
    status: str
    error: ErrorInfo | None


class Node(Generic[M, P]):
    """An input or a run.

    Attributes:
        key: The input's `codec-message-id`, or the run's id.
        parent: The `codec-message-id` of the message before; None at the root.
        serial: Where the node stands; None as long as it is only here (an input that has not come back yet).
        number: Tells nodes without a serial apart: the order in which they were made.
        place: Where the tree has filed the node: its parent and its place in the order; None if it has not.
        log: See `EventLog`.
    """

    def __init__(self, codec: Codec[M, P], key: str, number: int) -> None:
        self.key = key
        self.parent: str | None = None
        self.serial: str | None = None
        self.number = number
        self.place: Place | None = None
        self.log = EventLog()
        self._codec = codec
        self._seeds: dict[str, Any] = {}  # inputs of this client that have not come back yet, by message id
        self._projection = codec.init()
        self._stale = False
        self._messages: Sequence[CodecMessage[M]] | None = None

    def where(self) -> Place:
        """Where the node belongs as it is now."""
        return self.parent, (self.serial is None, self.serial or "", self.number)

    @property
    def projection(self) -> P:
        """What the codec made of the content. Folded anew here if it must be, so that many changes cost it once."""
        if self._stale:
            self._stale = False
            self._projection = self._codec.init()
            for entry in self.log:
                if self.shows(entry.attempt):
                    self._fold(entry.events, entry.serial, entry.message_id)
            for message_id, event in self._seeds.items():
                self._fold([("input", event)], "", message_id)
        return self._projection

    @property
    def messages(self) -> Sequence[CodecMessage[M]]:
        """The node's messages. The same object until something changes."""
        if self._messages is None:
            self._messages = self._codec.get_messages(self.projection)
        return self._messages

    def shows(self, attempt: Attempt | None) -> bool:
        """Whether an attempt's output is part of the content."""
        return True

    def take(
        self,
        serial: str,
        version: str,
        message_id: str,
        events: Sequence[tuple[Direction, Any]],
        attempt: Attempt | None,
        *,
        streamed: bool,
    ) -> bool:
        """Take a delivery's events in. Whether the content changed."""
        echoed = self._seeds.pop(message_id, None) is not None
        recorded = self.log.record(serial, version, message_id, events, attempt, streamed=streamed)
        if recorded is Recorded.KNOWN or not self.shows(attempt):
            if echoed:
                self.rebuild()
            return echoed
        self._messages = None
        if self._stale:
            return True
        if recorded is Recorded.EARLIER or echoed or self._seeds:
            self._stale = True
        else:
            self._fold(events, serial, message_id)
        return True

    def rebuild(self) -> None:
        """Fold everything anew at the next look. What is no longer kept stays as it was folded."""
        if not self.log.swept:
            self._stale = True
            self._messages = None

    def seed(self, message_id: str, event: Any) -> None:
        """Show an input of this client before it has come back."""
        if self.log.swept:
            return  # it could not be replaced by its echo any more, so the echo has to be waited for
        self._seeds[message_id] = event
        self._messages = None
        if not self._stale:
            self._fold([("input", event)], "", message_id)

    def unseed(self, message_id: str) -> bool:
        """Take it back. Whether there was one."""
        if self._seeds.pop(message_id, None) is None:
            return False
        self.rebuild()
        return True

    def sweep(self) -> None:
        """Forget the log's events, with the content as the log gives it."""
        _ = self.projection
        self.log.sweep()

    def _fold(self, events: Iterable[tuple[Direction, Any]], serial: str, message_id: str) -> None:
        fold, meta = self._codec.fold, FoldMeta(serial, message_id)
        for direction, event in events:
            self._projection = fold(self._projection, direction, event, meta)


class InputNode(Node[M, P]):
    """Something that a client said.

    Attributes:
        fork_of: The input that it replaces; its `codec-message-id`.
    """

    fork_of: str | None = None

    @property
    def codec_message_id(self) -> str:
        """Its id."""
        return self.key


class _Step:
    """The attempts of a step."""

    __slots__ = ("canonical", "ends", "first", "outputs", "starts")

    def __init__(self, serial: str) -> None:
        self.first = serial  # of its messages, the earliest seen
        self.starts: dict[str, str] = {}  # start serial -> step-client-id
        self.ends: dict[str, StepEvent] = {}  # start serial -> its end
        self.canonical: str | None = None
        self.outputs: set[str] = set()  # start serials that outputs were seen of


class _Origin(msgspec.Struct, frozen=True):
    """What the earliest output or input of a run says about it: all there is until its start is seen."""

    serial: str
    parent: str | None
    fork_of: str | None
    regenerates: str | None
    client_id: str
    invocation_id: str


class RunNode(Node[M, P]):
    """What an agent did about one input.

    Attributes:
        status: See `RunInfo`.
        error: With status `error`.
        fork_of: The input that the answered one replaces.
        regenerates: The message that this run makes anew.
        client_id: Owner; empty if nobody said.
        invocation_id: The first invocation; empty if nobody said.
        resumed_by: The last invocation that resumed it.
        end_serial: Where it was suspended or ended last.
        answered: `codec-message-id`s of the steering inputs that outputs were stamped with.
        last_activity: Channel time (milliseconds) of its newest message.
    """

    def __init__(self, codec: Codec[M, P], key: str, number: int) -> None:
        super().__init__(codec, key, number)
        self.status = "active"
        self.error: ErrorInfo | None = None
        self.fork_of: str | None = None
        self.regenerates: str | None = None
        self.client_id = ""
        self.invocation_id = ""
        self.resumed_by: str | None = None
        self.end_serial: str | None = None
        self.answered: set[str] = set()
        self.last_activity = 0
        self.queued = False  # to have its log emptied
        self._known_from: str | None = None  # the earliest message that makes a run; ends and suspends before do not
        self._events: list[RunEvent] = []  # in the order of the channel
        self._origin: _Origin | None = None
        self._steps: dict[str, _Step] = {}
        self._step_infos: tuple[StepInfo, ...] | None = None

    @property
    def run_id(self) -> str:
        """Its id. Of an answer that no agent has taken up yet: the `codec-message-id` of the input."""
        return self.key

    @property
    def known(self) -> bool:
        """Whether anything was seen that makes a run. An end or a suspension alone does not."""
        return self._known_from is not None

    @property
    def started(self) -> bool:
        """Whether its start was seen."""
        return any(event.verb == "start" for event in self._events)

    @property
    def settled(self) -> bool:
        """Whether nothing more is to be expected: start and end were seen, no step is open, and every input is back."""
        if self.status in ("active", "suspended") or not self.started or self._seeds:
            return False
        return all(step.canonical is None or step.canonical in step.ends for step in self._steps.values())

    @property
    def events(self) -> Sequence[RunEvent]:
        """Its lifecycle messages, in the order of the channel."""
        return self._events

    def info(self) -> RunInfo:
        """The run as it is now."""
        return RunInfo(
            run_id=self.key,
            client_id=self.client_id,
            invocation_id=self.invocation_id,
            steps=self.steps,
            status=self.status,
            error=self.error,
        )

    # -- messages of the run

    def begin(self, serial: str, headers: Headers) -> None:
        """An output or input of the run. The earliest one says where the run stands, until its start is seen."""
        if self._origin is None or serial < self._origin.serial:
            self._originate(
                _Origin(
                    serial,
                    headers.get(H.PARENT),
                    headers.get(H.FORK_OF),
                    headers.get(H.MSG_REGENERATE),
                    headers.get(H.RUN_CLIENT_ID, ""),
                    headers.get(H.INVOCATION_ID, ""),
                )
            )

    def _originate(self, origin: _Origin) -> None:
        self._origin = origin
        self._know(origin.serial)
        self._place()

    def on_event(self, event: RunEvent) -> bool:
        """A lifecycle message. False if it was seen before."""
        if any(event.serial == known.serial for known in self._events):
            return False
        insort(self._events, event, key=_by_serial)
        if event.verb == "start":
            self._know(event.serial)
            self._place()
        self._read_events()
        return True

    def on_step(self, event: StepEvent) -> bool:
        """Start or end of an attempt. Whether content changed: another attempt's output was superseded."""
        step = self._steps.get(event.step_id)
        if step is None:
            step = self._steps[event.step_id] = _Step(event.serial)
        self._step_infos = None
        step.first = min(step.first or event.serial, event.serial)
        if event.reason is not None:
            known = step.ends.get(event.start_serial)
            if known is None or known.serial < event.serial:
                step.ends[event.start_serial] = event
            return False
        step.starts[event.serial] = event.step_client_id
        self._know(event.serial)
        if step.canonical is not None and event.serial <= step.canonical:
            return False
        before, step.canonical = step.canonical, event.serial
        # What was shown is not any more, or what was not is: its output may have come before it, and before this start.
        unchanged = not step.outputs or (before is None and step.outputs == {event.serial})
        if unchanged or self.log.swept:
            return False
        self.rebuild()
        return True

    def attempt(self, step_id: str, start_serial: str) -> Attempt:
        """Note that there is output of an attempt."""
        step = self._steps.get(step_id)
        if step is None:
            # Not seen by its own messages: known by its outputs only, and no step yet for those who ask.
            step = self._steps[step_id] = _Step("")
        step.outputs.add(start_serial)
        return step_id, start_serial

    def shows(self, attempt: Attempt | None) -> bool:
        """Outputs of an attempt that was superseded are not shown; those of one whose start is not known yet are."""
        if attempt is None:
            return True
        canonical = self._steps[attempt[0]].canonical
        return canonical is None or canonical == attempt[1]

    def absorb(self, fork: RunNode[M, P]) -> None:
        """Take over what stood under the id of the input, until it was known that this run answers it."""
        self.log.absorb(fork.log)
        self._seeds.update(fork._seeds)
        self.last_activity = max(self.last_activity, fork.last_activity)
        if fork._origin is not None and (self._origin is None or fork._origin.serial < self._origin.serial):
            self._originate(fork._origin)
        self.rebuild()

    # -- what follows from them

    def latest_step_client_id(self) -> str | None:
        """Of the latest start that names one."""
        named = [start for step in self._steps.values() for start in step.starts.items() if start[1]]
        return max(named)[1] if named else None

    @property
    def steps(self) -> tuple[StepInfo, ...]:
        """See `RunInfo`."""
        if self._step_infos is None:
            self._step_infos = tuple(self._infos())
        return self._step_infos

    def _infos(self) -> Iterator[StepInfo]:
        for step_id, step in sorted(self._steps.items(), key=lambda item: item[1].first):
            # An end in front of everything that makes a run is not of this run's life.
            ends = {start: end for start, end in step.ends.items() if self._lives_at(end.serial)}
            if not step.starts and not ends:
                continue
            canonical = step.canonical
            end = ends.get(canonical) if canonical is not None else None
            yield StepInfo(
                step_id=step_id,
                status="active" if end is None or end.reason is None else end.reason,
                attempt_count=len(step.starts.keys() | ends.keys()),
                step_client_id=step.starts[canonical] if canonical is not None else None,
            )

    def _lives_at(self, serial: str) -> bool:
        return self._known_from is not None and self._known_from < serial

    def _know(self, serial: str) -> None:
        if self._known_from is None or serial < self._known_from:
            self._known_from = serial
            self._step_infos = None
            self._read_events()

    def _read_events(self) -> None:
        """The status machine, over the lifecycle messages in the order of the channel."""
        status, error, resumed_by, end_serial = "active", None, None, None
        for event in self._events:
            if event.verb == "start":
                if status == "suspended":
                    status = "active"
            elif not self._lives_at(event.serial):
                continue  # of a run that nobody had heard of at that place
            elif event.verb == "resume":
                resumed_by = event.invocation_id or resumed_by
                if status == "suspended":
                    status = "active"
            elif event.verb == "suspend":
                # A suspension that lost the race against the next invocation's resumption says nothing any more.
                if resumed_by is None or event.invocation_id in ("", resumed_by):
                    status, error, end_serial = "suspended", None, event.serial
            else:
                status, error, end_serial = event.reason or "complete", event.error, event.serial
        self.status, self.error, self.resumed_by, self.end_serial = status, error, resumed_by, end_serial

    def _place(self) -> None:
        """Parent, serial and the like: what the starts say, in their order, then what the earliest message says."""
        said: list[RunEvent | _Origin] = [event for event in self._events if event.verb == "start"]
        if self._origin is not None:
            said.append(self._origin)
        self.serial = min(one.serial for one in said)
        self.parent = next((one.parent for one in said if one.parent is not None), None)
        self.fork_of = next((one.fork_of for one in said if one.fork_of is not None), None)
        self.regenerates = next((one.regenerates for one in said if one.regenerates is not None), None)
        self.client_id = next((one.client_id for one in said if one.client_id), "")
        self.invocation_id = next((one.invocation_id for one in said if one.invocation_id), "")
