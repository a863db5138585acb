"""A turn's run on its session's channel: what is said while a unit runs, and how it is settled when it is committed.

Three rules carry everything here (design: the way of one turn).

* What streams is provisional: an attempt opens with its first output, and a later one of the same step supersedes it.
* The commit says what counts (`OutRecord`). After it, `settle` makes the channel show exactly that: where the attempt
  that is there already shows it, acknowledged to the last word, it is only ended; else a new attempt says it whole.
* All that settling writes has ids that follow from the record, so that a process that knows nothing but the record
  writes the very same messages, and the channel keeps them once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal

import anyio
import msgspec

from stepwell._clock import Clock
from stepwell.errors import StepwellError
from stepwell.loop import verdict_of
from stepwell.messages import JsonObject, Part, Usage, UserMessage
from stepwell.sessions import OutRecord, TurnRecord
from stepwell.transport import ChannelWriter, Codec, Encoder
from stepwell.wire import (
    ErrorInfo,
    H,
    Headers,
    RunHeaders,
    WireMessage,
    run_end,
    run_resume,
    run_start,
    run_suspend,
    step_end,
    step_start,
)

from ._events import (
    AttemptStarted,
    CandidateClassified,
    ReasoningDelta,
    Superseded,
    TextDelta,
    ToolFinished,
    ToolInputDelta,
    ToolProgress,
    TurnEvent,
    UnitStarted,
)
from ._ids import new_id
from ._outputs import Outputs
from ._shape import Emitted, begin_chunks, end_chunks, json_text, progress_chunk, result_part, user_parts, whole_chunks

__all__ = ["Publication"]

_PATIENCE: Final = 1.0
"""Seconds that a commit waits for the acknowledgement of what was streamed. Past it the commit goes first, and a new
attempt says it again: a channel that is away must not hold a turn up."""

StepReason = Literal["complete", "failed", "cancelled"]


class Publication:
    """One run of an engine on a channel. A `Reader` of the turn's events, as far as the turn is concerned.

    Args:
        writer: The channel, with the epoch of the lease.
        codec: Of UI messages.
        clock: For the patience.
        turn: Whose run this is.
        check: Raises where the lease ran out, which is asked before each start and end of a step.
        taken_over: Whether another process may have shown something of the unit that comes next.
        roll_up: See `Codec.create_encoder`.
        report: Told of what the channel refuses for good.
    """

    def __init__(
        self,
        writer: ChannelWriter,
        codec: Codec[Any, Any],
        clock: Clock,
        turn: TurnRecord,
        *,
        check: Callable[[], object],
        taken_over: bool,
        roll_up: float,
        report: Callable[[str, Exception], None],
    ) -> None:
        self.writer = writer
        self.codec = codec
        self.clock = clock
        self.roll_up = roll_up
        self.report = report
        self.turn = turn
        self._check = check
        self._dirty = taken_over
        self._mode = "off"
        self._step = ""
        self._stage = ""
        self._attempt: _Attempt | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._latest: asyncio.Task[None] | None = None

    # -- ids and headers

    @property
    def input_id(self) -> str | None:
        """The `codec-message-id` of what the invocation follows: what the person said, or what it goes on from."""
        return self.turn.follows or self.turn.said

    @property
    def message_id(self) -> str:
        """The `codec-message-id` of what is shown now."""
        return self.turn.message or self.turn.invocation

    def _run(self) -> RunHeaders:
        return RunHeaders(
            run_id=self.turn.run, invocation_id=self.turn.invocation, input_codec_message_id=self.input_id
        )

    def output_headers(self, step: str, start: str) -> Headers:
        """Of every output of an attempt."""
        input_id = self.input_id
        headers = {
            H.ROLE: "assistant",
            H.CODEC_MESSAGE_ID: self.message_id,
            H.RUN_ID: self.turn.run,
            H.RUN_CLIENT_ID: "",
            H.PARENT: input_id or self.turn.parent,
            H.INVOCATION_ID: self.turn.invocation,
            H.INPUT_CODEC_MESSAGE_ID: input_id,
            H.STEP_ID: step,
            H.STEP_CLIENT_ID: "",
            H.STEP_START_SERIAL: start,
            H.STEER_CODEC_MESSAGE_IDS: self._answered(step),
        }
        return {key: value for key, value in headers.items() if value is not None}

    def _answered(self, step: str) -> str | None:
        """Which of what was said meanwhile a step answers."""
        unit = int(step.rpartition("-")[2])
        ids = [steer.said for steer in self.turn.steers if steer.unit == unit]
        return json_text(ids) if ids else None

    async def start_step(self, step: str, idempotency_id: str) -> str:
        """Publish the start of an attempt; returns its serial."""
        self._check()
        return (await self.writer.publish([step_start(self._run(), step, "", idempotency_id=idempotency_id)]))[0]

    def step_end(self, step: str, start: str, reason: StepReason) -> WireMessage:
        """The end of an attempt."""
        self._check()
        return step_end(self._run(), step, start, reason, "", idempotency_id=f"{step}:{start}:end")

    # -- the run

    async def open(self, message: UserMessage | None) -> None:
        """Say what the person said, and that the run starts: together. May be repeated, also by another process."""
        turn = self.turn
        messages: list[WireMessage] = []
        input_id = self.input_id
        if message is not None and input_id is not None and turn.published is None:
            messages = self._said(message.content, input_id, turn.parent, {})
        parent = input_id or turn.parent
        messages.append(run_start(self._run(), parent=parent, idempotency_id=f"{turn.run}:open"))
        await self.writer.publish(messages)

    def _said(
        self, content: str | Sequence[Any], message_id: str, parent: str | None, more: Headers
    ) -> list[WireMessage]:
        said = {"id": message_id, "role": "user", "parts": user_parts(content)}
        return self._input(self.codec.create_user_message(said), message_id, parent, message_id, more)

    def _input(self, event: Any, message_id: str, parent: str | None, name: str, more: Headers) -> list[WireMessage]:
        """An input as a client would publish it; `name` is its own, whoever publishes it."""
        headers = {H.ROLE: "user", H.CODEC_MESSAGE_ID: message_id, H.EVENT_ID: name, H.RUN_CLIENT_ID: "", **more}
        if parent is not None:
            headers[H.PARENT] = parent
        return [
            WireMessage(name=one.name, data=one.data, extras=one.extras, idempotency_id=f"{name}:{at}")
            for at, one in enumerate(self.codec.encode_input(event, headers))
        ]

    async def hear(self, message: UserMessage) -> None:
        """Say what the person said while the run goes on. May be repeated, also by another process."""
        await self.writer.publish(self._said(message.content, message.id, None, {H.RUN_ID: self.turn.run}))

    async def resume(self) -> None:
        """Say what was answered, and that the run goes on: together. May be repeated, also by another process.

        Only verdicts and what a person said are said as such: what else was answered is shown as the call's result. A
        client that goes on in a run of its own gets that one.
        """
        turn = self.turn
        messages: list[WireMessage] = []
        run = {H.RUN_ID: turn.run}
        for one in turn.pending:
            if one.state != "answered" or one.shown:
                continue
            if one.said is not None:
                content = one.answer if isinstance(one.answer, str) else msgspec.convert(one.answer, tuple[Part, ...])
                messages += self._said(content, one.said, one.parent, run)
            elif one.kind == "approval" and one.message is not None:
                approved, reason = verdict_of(one.answer) or (False, None)
                event = self.codec.create_tool_approval_response(
                    one.message, one.call, approved=approved, reason=reason
                )
                messages += self._input(event, one.message, one.message, f"{turn.run}:answer:{one.id}", run)
        name = f"{turn.invocation}:resume"
        if any(one.fork for one in turn.pending):
            messages.append(run_start(self._run(), parent=turn.said or turn.parent, idempotency_id=name))
        else:
            messages.append(run_resume(self._run(), idempotency_id=name))
        await self.writer.publish(messages)

    async def suspend(self) -> None:
        """Settle what is committed, and say that the run waits. May be repeated, also by another process."""
        await self.settle(run_suspend(self._run(), idempotency_id=f"{self.turn.invocation}:suspend"))

    async def end(self, reason: Literal["complete", "cancelled", "error"], error: str) -> None:
        """Settle what is committed, and say that the run is over. May be repeated, also by another process."""
        info = ErrorInfo(message=error) if reason == "error" else None
        last = run_end(self._run(), reason, info, idempotency_id=f"{self.turn.run}:end")
        await self.settle(last)

    # -- a unit as it runs: what the turn's stream tells

    def push(self, event: TurnEvent) -> None:
        """Take an event of the turn. Never waits: what goes out goes out in a task beside."""
        kind = type(event)
        if kind is TextDelta:
            self._say("text", event.text)  # pyright: ignore[reportAttributeAccessIssue, reportUnknownMemberType, reportUnknownArgumentType]
            return
        match event:
            case ReasoningDelta():
                self._say("reasoning", event.text)
            case ToolInputDelta():
                self._propose(event)
            case ToolFinished():
                if self._mode == "live":
                    attempt = self._live()
                    attempt.say(attempt.emitted.result(result_part(event.call, event.outcome, event.content)))
            case ToolProgress():
                if self._mode == "live":
                    self._live().say([progress_chunk(event.call, event.name, event.value)])
            case CandidateClassified():
                if event.verdict not in ("accepted", "cancelled"):  # a cancelled one stays, for `give_up`
                    self._drop()
            case Superseded() | AttemptStarted():
                self._drop()
            case UnitStarted():
                self._begin(event)
            case _:
                pass

    def close(self) -> None:
        """There are no more events."""

    def _begin(self, event: UnitStarted) -> None:
        if self._step and self._step != event.step:
            self._dirty = False
        self._step, self._stage, self._mode = event.step, event.stage, event.mode
        self._attempt = None

    def _live(self) -> _Attempt:
        """The attempt that streams; made with its first output."""
        if self._attempt is None:
            message_id = None if self.turn.shown else self.message_id
            self._attempt = _Attempt(self, self._step, f"{self.turn.unit}-")
            self._attempt.say(begin_chunks(message_id, self._stage))
            task = asyncio.create_task(self._attempt.run(self._latest))
            self._latest = task
            self._tasks.append(task)
            task.add_done_callback(self._tasks.remove)
        return self._attempt

    def _say(self, kind: str, text: str) -> None:
        attempt = self._attempt or self._live()
        attempt.say(attempt.emitted.say(kind, text))

    def _propose(self, event: ToolInputDelta) -> None:
        attempt = self._live()
        attempt.say(attempt.emitted.propose(event.call, event.name, event.delta))

    def _drop(self) -> None:
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            self._dirty = self._dirty or attempt.begun
            attempt.finish("failed")

    # -- its commit

    async def accept(
        self, parts: Sequence[JsonObject], usage: Mapping[str, Usage] | None, *, waits: bool = False
    ) -> OutRecord | None:
        """What the commit of this unit has to say about its output; `None` where nothing is or was shown.

        Args:
            parts: What the unit shows, whole.
            usage: Of the turn, where this is its last unit.
            waits: Whether it is the last because calls wait for their answers.
        """
        attempt, self._attempt = self._attempt, None
        first = not self.turn.shown
        start: str | None = None
        if attempt is not None:
            closing = attempt.emitted.accept(parts) if attempt.begun else None
            if closing is not None:
                attempt.say([*closing, *end_chunks(usage, waits=waits)])
                start = await attempt.acknowledged(_PATIENCE)
            else:
                attempt.finish("failed")
            self._dirty = self._dirty or attempt.begun
        if start is None and not parts and not self._dirty and not (waits and self.turn.shown):
            return None
        return OutRecord(
            step=self._step,
            stage=self._stage,
            start=start,
            parts=() if start is not None else parts,
            dirty=self._dirty,
            first=first,
            last=usage is not None,
            waits=waits,
        )

    async def give_up(self, reason: Literal["failed", "cancelled"]) -> OutRecord | None:
        """The turn ends within this unit: what its closing commit has to say.

        What a cancelled candidate said stays; what a dead one said is replaced by nothing.
        """
        attempt, self._attempt = self._attempt, None
        step = self._step or f"{self.turn.invocation}-step-{self.turn.unit}"
        if attempt is not None:
            attempt.finish(reason)
            self._dirty = self._dirty or attempt.begun
            if reason == "cancelled" and (start := await attempt.acknowledged(_PATIENCE)) is not None:
                return OutRecord(step=step, stage=self._stage, start=start, dirty=True, reason=reason)
        return self._record(step, reason, ())

    def unfinished(self, results: Sequence[JsonObject], reason: Literal["failed", "cancelled"]) -> OutRecord | None:
        """As `give_up`, where calls were open: what became of them is shown in the place of what their unit showed."""
        shown = results if self._mode != "off" else ()
        return self._record(f"{self.turn.invocation}-step-{self.turn.unit}", reason, shown)

    def _record(
        self, step: str, reason: Literal["failed", "cancelled"], parts: Sequence[JsonObject]
    ) -> OutRecord | None:
        if not self._dirty and not parts:
            return None
        first = not self.turn.shown
        return OutRecord(step=step, stage=self._stage, parts=parts, dirty=True, reason=reason, first=first)

    def stands(self, stage: str, mode: str) -> None:
        """Where the turn stands, until a unit begins."""
        self._stage, self._mode = stage, mode

    async def settle(self, last: WireMessage | None = None) -> None:
        """Make the channel show what was committed, and `last` behind it. May be repeated, also by another process.

        Raises:
            FencedError: A newer epoch writes.
            SessionClosedError: The writer was stopped.
        """
        await self._quiet()
        messages: list[WireMessage] = []
        for out in self.turn.outs:
            start = out.start
            if start is None:
                start = await self.start_step(out.step, f"{out.step}:settle")
                if out.parts or out.waits:
                    messages = await self._say_whole(out, start)
            messages.append(self.step_end(out.step, start, out.reason))
            if out is not self.turn.outs[-1]:
                await self.writer.publish(messages)
                messages = []
        if last is not None:
            messages.append(last)
        if messages:
            await self.writer.publish(messages)

    async def _say_whole(self, out: OutRecord, start: str) -> list[WireMessage]:
        """Say what is to be shown, up to the messages behind its last text: those go out with the attempt's end."""
        if out.parts:
            chunks = begin_chunks(self.message_id if out.first else None, out.stage)
            chunks += whole_chunks(out.parts, f"{out.step.rpartition('-')[2]}-")
            chunks += end_chunks({} if out.last else None, waits=out.waits)
        else:
            chunks = end_chunks({}, waits=True)[-1:]  # nothing but the end of the message

        async def headers() -> Headers:
            return self.output_headers(out.step, start)

        outputs = Outputs(self.writer, f"{out.step}:settle")
        # Without a window: what is appended together must not depend on time, or a repetition would differ.
        encoder = self.codec.create_encoder(outputs, headers, message_id=self.message_id, roll_up=3600.0)
        for chunk in chunks:
            await encoder.publish_output(chunk)
        await encoder.close()
        return outputs.rest()

    async def _quiet(self) -> None:
        """Wait until nothing of an attempt is under way: whatever it says late would come behind what is settled."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def leave(self) -> None:
        """Say nothing more, whatever is under way. The run stays as it is on the channel."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            with anyio.CancelScope(shield=True):
                await asyncio.wait(tasks)


class _Attempt:
    """One attempt as it streams, in a task of its own: the turn does not wait for the channel, token by token."""

    def __init__(self, publication: Publication, step: str, prefix: str) -> None:
        self.emitted = Emitted(prefix)
        self.begun = False  # its start may be on the channel
        self._publication = publication
        self._step = step
        self._name = new_id()
        self._queue: deque[dict[str, Any]] = deque()
        self._wake = asyncio.Event()
        self._over = asyncio.Event()
        self._reason: StepReason | None = None
        self._complete = False
        self._serial: str | None = None
        self._error: Exception | None = None

    # -- for the publication

    def say(self, chunks: list[dict[str, Any]]) -> None:
        """Say more."""
        self._queue.extend(chunks)
        self._wake.set()

    def finish(self, reason: StepReason) -> None:
        """It is dead: end it on the channel, at once. Of a cancelled one, what was said goes out before."""
        self._reason = reason
        if reason == "failed":
            self._queue.clear()
        self._wake.set()

    async def acknowledged(self, patience: float) -> str | None:
        """Wait until everything is on the channel; returns the serial of its start, or `None` if it is not."""
        self._complete = True
        self._wake.set()
        clock = self._publication.clock
        with anyio.CancelScope() as scope:
            timer = clock.call_at(clock.monotonic() + patience, scope.cancel)
            try:
                await self._over.wait()
            finally:
                timer.cancel()
        if not self._over.is_set():
            self.finish("failed")  # too late: it is said again, whole
            return None
        return self._serial if self._error is None else None

    # -- the task

    async def run(self, previous: asyncio.Task[None] | None) -> None:
        """Write what is said, behind all that an earlier attempt had to say."""
        try:
            if previous is not None:
                await asyncio.wait([previous])
            if self._reason != "failed":
                await self._stream()
        except StepwellError as error:
            self._error = error
        except Exception as error:  # noqa: BLE001 - it is said again when it is settled, and fails there if it must
            self._error = error
            self._publication.report("an output could not be written", error)
        finally:
            self._over.set()

    async def _stream(self) -> None:
        publication = self._publication
        outputs = Outputs(publication.writer, f"{self._step}:{self._name}")
        encoder = publication.codec.create_encoder(
            outputs, self._headers, message_id=publication.message_id, roll_up=publication.roll_up
        )
        self.begun = True
        window = asyncio.create_task(self._roll_up(encoder))
        try:
            await self._write(encoder, outputs)
        finally:
            window.cancel()
            await asyncio.wait([window])
        messages = outputs.rest()
        if self._reason is not None and self._serial is not None:
            messages.append(publication.step_end(self._step, self._serial, self._reason))
        if messages:
            await publication.writer.publish(messages)

    async def _write(self, encoder: Encoder, outputs: Outputs) -> None:
        while True:
            while self._queue:
                await encoder.publish_output(self._queue.popleft())
                if self._error is not None:
                    raise self._error
            if self._reason is not None or self._complete:
                break
            self._wake.clear()
            await outputs.flush()
            await self._wake.wait()
        if self._reason == "cancelled":
            await encoder.cancel_streams()
        await encoder.close()

    async def _roll_up(self, encoder: Encoder) -> None:
        try:
            await encoder.run()
        except StepwellError as error:
            self._error = error
            self._complete = True
            self._wake.set()

    async def _headers(self) -> Headers:
        self._serial = await self._publication.start_step(self._step, f"{self._step}:{self._name}:start")
        return self._publication.output_headers(self._step, self._serial)
