"""The session document: one conversation's head, and the rows that only ever grow beside it.

The head is small and is written whole by every commit. Everything that grows with the conversation (messages, sequence,
log, journal, inbox) is rows that are written once. All of it is plain JSON with versions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import msgspec

from stepwell.errors import NewerSchemaError, StoreDataError
from stepwell.messages import JsonObject, JsonValue, Message, Usage

__all__ = [
    "SCHEMA",
    "DeferredRecord",
    "LogEntry",
    "MemoryHead",
    "ModelUsage",
    "OutRecord",
    "PendingRecord",
    "SequenceEntry",
    "SessionHead",
    "SessionStatus",
    "SessionSummary",
    "StageRecord",
    "Summary",
    "TurnRecord",
    "VisitRecord",
    "WorkflowRecord",
    "decode_head",
    "encode_head",
]

SCHEMA = "stepwell.session/1"
"""Name and version of the document's own format; the workflow's `schema_version` is another number."""

SessionStatus: TypeAlias = Literal["running", "completed", "aborted", "suspended"]
LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]


class WorkflowRecord(msgspec.Struct, omit_defaults=True):
    """Which workflow a session runs. `id` is the stable id, `model` the selection without secrets."""

    id: str
    kind: Literal["flow", "graph"] = "flow"
    schema_version: int = 1
    model: JsonObject | None = None
    context: JsonObject = msgspec.field(default_factory=dict[str, Any])
    current: str = ""


class StageRecord(msgspec.Struct, omit_defaults=True):
    """What a stage keeps: its state, and its model where it differs from the workflow's."""

    state: JsonObject = msgspec.field(default_factory=dict[str, Any])
    model: JsonObject | None = None


class Summary(msgspec.Struct, frozen=True):
    """What compaction made of the messages up to and including `through` (a message id)."""

    text: str
    through: str


class MemoryHead(msgspec.Struct, omit_defaults=True):
    """Where a namespace's messages lie: positions `first` to `next - 1`, never reused."""

    first: int = 0
    next: int = 0
    summary: Summary | None = None

    @property
    def count(self) -> int:
        """How many messages there are."""
        return self.next - self.first


class ModelUsage(msgspec.Struct, omit_defaults=True):
    """Tokens of one model over the session; `unknown` counts attempts whose usage was not reported."""

    usage: Usage = Usage()
    attempts: int = 0
    unknown: int = 0


class VisitRecord(msgspec.Struct, omit_defaults=True):
    """One stay of the cursor in a stage within a turn.

    Attributes:
        stage: The stage.
        prior: The stage it came from, for `on_crossing`.
        crossing: Whether `on_crossing` (or `on_start` where `fresh`) is still to come.
        fresh: Whether this is the first visit of a new session.
        started: Whether `on_visit` has fired.
        message: The message handed over by the transition, a message record.
        rounds: Accepted replies and nudges so far.
        alternate: The active temporary alternate model.
        alternate_used: Whether there was one.
        content_type: MIME type that the transition gave its reply.
    """

    stage: str
    prior: str | None = None
    crossing: bool = False
    fresh: bool = False
    started: bool = False
    message: JsonObject | None = None
    rounds: int = 0
    alternate: JsonObject | None = None
    alternate_used: bool = False
    content_type: str | None = None


class PendingRecord(msgspec.Struct, omit_defaults=True):
    """A request that a suspended turn waits for.

    Attributes:
        id: Names it to whoever answers.
        kind: `approval`, `question` or `client_tool`.
        call: Id of the call that gets its result from the answer.
        tool: Name of that call's tool.
        payload: JSON for whoever answers.
        expires: When it stops waiting, Unix time in seconds.
        state: `waiting`, `answered`, or `expired`.
        answer: What was answered.
        message: The message on the channel that shows the call; `None`: it is not shown.
        said: Id of the person's message that answered it, if one did.
        parent: The message that it follows.
        shown: Whether whoever answered has put the answer on the channel.
        fork: Whether `said` is a client's copy of the conversation, with which it goes on in a run of its own.
    """

    id: str
    kind: Literal["approval", "question", "client_tool"]
    call: str
    tool: str
    payload: JsonValue = None
    expires: float | None = None
    state: Literal["waiting", "answered", "expired"] = "waiting"
    answer: JsonValue = None
    message: str | None = None
    said: str | None = None
    parent: str | None = None
    shown: bool = False
    fork: bool = False


class DeferredRecord(msgspec.Struct, frozen=True):
    """A message of a namespace that comes behind the results of calls that wait."""

    ns: str
    message: Message


class OutRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the last unit shows, until it is settled on the channel.

    Attributes:
        step: Its step id.
        stage: Its stage.
        start: Serial of the attempt that shows exactly this, all of it acknowledged; `None`: there is none.
        parts: What is to be shown, for a new attempt; empty where `start` is given.
        dirty: Whether an attempt of this step may be on the channel.
        reason: How the step ends.
        first: Whether this is the first that the run's message shows.
        last: Whether the message ends with it.
        waits: Whether it ends because calls wait for their answers.
    """

    step: str
    stage: str
    start: str | None = None
    parts: Sequence[JsonObject] = ()
    dirty: bool = False
    reason: Literal["complete", "failed", "cancelled"] = "complete"
    first: bool = False
    last: bool = False
    waits: bool = False


class SteerRecord(msgspec.Struct, frozen=True):
    """What was said while a turn ran.

    Attributes:
        key: Unique key of its inbox row.
        message: Id of the user's message.
        unit: Index of the unit whose reply answers it.
        published: Its `codec-message-id`, where a client has put it on the channel itself.
    """

    key: str
    message: str
    unit: int
    published: str | None = None

    @property
    def said(self) -> str:
        """The `codec-message-id` of what was said."""
        return self.published or self.message


class TurnRecord(msgspec.Struct, omit_defaults=True):
    """The open turn: all that another process needs to go on with it.

    Attributes:
        run: Run id.
        invocation: Invocation id; step ids are made from it.
        visit: The current visit.
        phase: `open`: units are to be run. `suspended`: it waits for answers (once all is said on the channel, the
            session's status says so too). `closing`: the last unit is committed, and `result` is the turn's.
        outs: What committed units show that may not be settled yet, where the session has a channel: the last one, and
            where the turn failed in the next, that one too.
        result: See `phase`.
        parent: The message of the conversation that this turn's follows.
        message: The message that the turn's output is part of; by default that of the invocation. One that follows what
            was said meanwhile is another.
        shown: Whether anything of that message was shown.
        steers: What was said while it ran, and is part of it.
        follows: The message that this invocation's follows, where an earlier one of the run was suspended.
        unit: Index of the next unit.
        key: Unique key of the input's inbox row, if it has one.
        input: Id of the user's message.
        published: Its `codec-message-id`, where a client has put it on the channel itself.
        pending: What a suspended turn waits for; answered, until the unit that goes on with it is committed.
        answers: Keys of the inbox rows with the answers that this invocation goes on with.
        deferred: Messages that come behind the results of the calls that wait.
        hops: Logic steps run in a row.
        tokens: Tokens spent in this turn, as far as known.
        usage: The turn's usage by `provider:name`.
        expires: When a suspended turn stops waiting, Unix time in seconds: the first expiry of what it waits for. Then
            `SessionStore.due` lists it. Without one it waits until it is answered.
    """

    run: str
    invocation: str
    visit: VisitRecord
    phase: Literal["open", "suspended", "closing"] = "open"
    outs: Sequence[OutRecord] = ()
    result: JsonObject | None = None
    parent: str | None = None
    message: str | None = None
    shown: bool = False
    steers: Sequence[SteerRecord] = ()
    unit: int = 0
    key: str | None = None
    input: str | None = None
    published: str | None = None
    follows: str | None = None
    pending: Sequence[PendingRecord] = ()
    answers: Sequence[str] = ()
    deferred: Sequence[DeferredRecord] = ()
    hops: int = 0
    tokens: int = 0
    usage: dict[str, ModelUsage] = msgspec.field(default_factory=dict[str, ModelUsage])
    expires: float | None = None

    @property
    def said(self) -> str | None:
        """The `codec-message-id` of the user's message."""
        return self.published or self.input

    @property
    def tip(self) -> str | None:
        """The newest message of the conversation as far as this turn is concerned: what comes next follows it."""
        if self.shown:
            return self.message or self.invocation
        return self.steers[-1].said if self.steers else self.follows or self.said or self.parent


class SessionHead(msgspec.Struct, omit_defaults=True):
    """The part of the document that every commit writes.

    `id`, `revision` and the lease are columns beside it in a store; `revision` is filled in on load. `tip` is the
    `codec-message-id` of the newest message on the session's channel: what comes next follows it.
    """

    id: str
    workflow: WorkflowRecord
    schema: str = SCHEMA
    status: SessionStatus = "running"
    created_at: float = 0.0
    saved_at: float = 0.0
    revision: int = 0
    stages: dict[str, StageRecord] = msgspec.field(default_factory=dict[str, StageRecord])
    memories: dict[str, MemoryHead] = msgspec.field(default_factory=dict[str, MemoryHead])
    usage: dict[str, ModelUsage] = msgspec.field(default_factory=dict[str, ModelUsage])
    decision_usage: dict[str, ModelUsage] = msgspec.field(default_factory=dict[str, ModelUsage])
    turn: TurnRecord | None = None
    tip: str | None = None
    previous: str | None = None
    successor: str | None = None


class SequenceEntry(msgspec.Struct, frozen=True):
    """One activation of a stage. `at` is Unix time in seconds."""

    stage: str
    at: float
    level: int = 0


class LogEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """One line of the session log. `data` is JSON; neither field ever holds a prompt or a customer's text."""

    level: LogLevel
    at: float
    text: str
    data: JsonValue = None


class SessionSummary(msgspec.Struct, frozen=True):
    """One row of `list`."""

    id: str
    flow: str
    status: str
    revision: int
    created_at: float
    saved_at: float
    current: str = ""


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(SessionHead)


def encode_head(head: SessionHead) -> bytes:
    """Encode a head as JSON (UTF-8)."""
    return _encoder.encode(head)


def decode_head(data: bytes | str) -> SessionHead:
    """Decode a stored head.

    Raises:
        NewerSchemaError: It was written by a newer Stepwell; nothing is changed.
        StoreDataError: It is not a session document.
    """
    try:
        head = _decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        _refuse_newer(_schema_of(data))
        raise StoreDataError("A stored session document cannot be read: it is not a session document.") from error
    if head.schema != SCHEMA:
        _refuse_newer(head.schema)
        raise StoreDataError(f"A stored document says schema {head.schema!r}, expected {SCHEMA!r}.")
    return head


def _schema_of(data: bytes | str) -> str:
    try:
        value: Any = msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return ""
    return str(value.get("schema", "")) if isinstance(value, dict) else ""  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]


def _refuse_newer(schema: str) -> None:
    name, _, version = schema.partition("/")
    if name == SCHEMA.partition("/")[0] and version.isdigit() and int(version) > int(SCHEMA.partition("/")[2]):
        raise NewerSchemaError(
            f"A session document has schema {schema}, this Stepwell reads {SCHEMA}: update Stepwell."
        )
