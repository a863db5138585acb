"""The unmodified JavaScript SDK, driven from Python: see `tests/node/harness/bridge.mjs` for what it is told and says.

The channel's truth is here: `Bridge.deliver` hands the JavaScript clients what a channel delivered, and what they
publish is asked of the `Answer` that the channel was opened with. `wire.feed` does both for a channel of the product.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import subprocess
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, Self

from servers import node

TIMEOUT = 20.0

Json = dict[str, Any]
Delivered = Json
"""A message as the JavaScript client library hands it to a subscriber; see bridge.mjs."""


class BridgeError(Exception):
    """What was asked of it failed there, with its stack. `code` is that of the JavaScript error, if it had one."""

    def __init__(self, error: Mapping[str, Any]) -> None:
        super().__init__(f"{error.get('message')} ({error.get('code')})\n{error.get('stack') or ''}".rstrip())
        self.code: int | None = error.get("code")
        self.status_code: int | None = error.get("statusCode")


class BridgeDied(Exception):
    """Node ended, with the last lines of its errors."""


class Refused(Exception):
    """Raise it from an `Answer` to refuse what a client wants to publish."""

    def __init__(self, message: str, code: int, status_code: int = 400) -> None:
        super().__init__(message)
        self.code = code
        self.status_code = status_code


@dataclass(frozen=True, kw_only=True)
class Ask:
    """What a JavaScript client wants of the channel.

    Attributes:
        event: What. The others are None where bridge.mjs says that it has none.
        channel: Of which.
        client_id: Who publishes or attaches.
        messages: To be published: name, data, extras.
        message: To be appended to or updated: serial, data, extras.
        attachment: Number of the client's attachment, for `deliver(to=...)`.
        until_attach: The history before the attachment only.
        limit: Messages in the page.
        cursor: `next` of the page before.
    """

    event: Literal["publish", "append", "update", "attach", "detach", "history", "quiet"]
    channel: str
    client_id: str | None = None
    messages: Sequence[Json] = ()
    message: Json = field(default_factory=dict)
    attachment: int | None = None
    until_attach: bool = False
    limit: int = 0
    cursor: Any = None


Answer = Callable[[Ask], Awaitable[Any]]
"""Returns what bridge.mjs says for the event: `{"serials": [...]}`, `{"versionSerial": ...}`, `{"items": [...]}`."""


@dataclass(frozen=True, kw_only=True)
class View:
    """What a JavaScript client shows.

    Attributes:
        messages: `{codecMessageId, message}` of the visible branch.
        runs: Those of the visible branch, with status and steps.
        steps: By run id, of all runs the client heard of while attached.
        has_older: More could be paged in.
        errors: That its session emitted, so far.
        digest: The same for the same view.
    """

    messages: list[Json]
    runs: list[Json]
    steps: dict[str, list[Json]]
    has_older: bool
    errors: list[Json]
    digest: str

    @property
    def texts(self) -> list[str]:
        """`role:text` of each message, for assertions that people read."""
        return [
            f"{message['role']}:{'|'.join(part['text'] for part in message['parts'] if part['type'] == 'text')}"
            if "parts" in message
            else f"{message['role']}:{message['text']}"
            for message in (item["message"] for item in self.messages)
        ]

    @classmethod
    def of(cls, view: Json) -> View:
        return cls(
            messages=view["messages"],
            runs=view["runs"],
            steps=view.get("steps", {}),
            has_older=view["hasOlder"],
            errors=view.get("errors", []),
            digest=view.get("digest", ""),
        )


@dataclass(frozen=True, kw_only=True)
class RunHandle:
    """A JavaScript client's handle of a run it asked for, as it was when it was returned.

    Attributes:
        name: For the bridge.
        run_id: The run's.
        status: Of the run.
        invocation: JSON of what the agent is called with.
        input_codec_message_id: Of the message sent.
        input_event_id: Of its event.
        error: `{code, statusCode, message}` of a run that ended with one.
    """

    name: str
    run_id: str | None
    status: str
    invocation: Json
    input_codec_message_id: str | None
    input_event_id: str | None
    error: Json | None

    @classmethod
    def of(cls, run: Json) -> RunHandle:
        return cls(
            name=run["run"],
            run_id=run.get("runId"),
            status=run["status"],
            invocation=run["invocation"],
            input_codec_message_id=run.get("inputCodecMessageId"),
            input_event_id=run.get("inputEventId"),
            error=run.get("error"),
        )


@dataclass(frozen=True, kw_only=True)
class ScenarioClient:
    """An agent or a client of a scenario.

    Attributes:
        client_id: Its own.
        connection_id: Its own; tells apart two of one client id.
        is_client: A client session, with views; else an agent.
        seen: In order: `{"deliver": message, "view": {messages, runs, hasOlder}}`, the view being that after it, and
            `{"page": [message, ...]}` for a page of history, newest first.
    """

    client_id: str
    connection_id: str
    is_client: bool
    seen: list[Json]


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """What happened in a scenario.

    Attributes:
        published: As in the golden traces: op, by, messages or message, serials or versionSerial or error.
        history: What the channel held afterwards, newest first. Empty on a channel with `readers="each"`.
        result: What the scenario returns; `clientView` and `steps` in most.
        checks: `{label, ok, detail?}`.
        clients: In the order in which they first got something.
    """

    published: list[Json]
    history: list[Json]
    result: Json
    checks: list[Json]
    clients: list[ScenarioClient]

    @property
    def failed(self) -> list[Json]:
        """The checks that do not hold."""
        return [check for check in self.checks if not check["ok"]]

    def client(self, client_id: str) -> ScenarioClient:
        """The client session of that id."""
        return next(client for client in self.clients if client.client_id == client_id and client.is_client)


class BridgeProcess:
    """Node with the SDK. Many bridges may use it, each in a session of its own, from any event loop."""

    def __init__(self) -> None:
        self._errors: deque[str] = deque(maxlen=60)
        self._bridges: dict[int, Bridge] = {}
        self._replies: dict[int, tuple[Bridge, asyncio.Future[Any]]] = {}
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self._sessions = itertools.count(1)
        self._refs = itertools.count(1)
        self._ended = False
        self.unhandled: list[Json] = []
        self._process = subprocess.Popen(
            node("bridge.mjs"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # it ends when its standard input does, after the tests that use it
        )
        self._threads = [threading.Thread(target=target, daemon=True) for target in (self._read, self._read_errors)]
        for thread in self._threads:
            thread.start()

    @property
    def pid(self) -> int:
        """Of Node."""
        return self._process.pid

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for thread in self._threads:
            thread.join(5)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _join(self, bridge: Bridge) -> int:
        with self._lock:
            session = next(self._sessions)
            self._bridges[session] = bridge
        return session

    def _leave(self, session: int) -> None:
        with self._lock:
            del self._bridges[session]

    def _request(self, bridge: Bridge, line: Json) -> tuple[int, asyncio.Future[Any]]:
        future = asyncio.get_running_loop().create_future()
        with self._lock:
            if self._ended:
                raise self._death()
            ref = next(self._refs)
            self._replies[ref] = (bridge, future)
        self._write({"ref": ref, **line})
        return ref, future

    def _forget(self, ref: int) -> None:
        with self._lock:
            self._replies.pop(ref, None)

    def _write(self, line: Json) -> None:
        assert self._process.stdin is not None
        data = json.dumps(line).encode() + b"\n"
        with self._writing, contextlib.suppress(BrokenPipeError, ValueError):  # the reader says that it died
            self._process.stdin.write(data)
            self._process.stdin.flush()

    def _death(self) -> BridgeDied:
        said = "\n".join(f"    {line}" for line in self._errors)
        return BridgeDied(f"Node ended with {self._process.poll()}\n{said}")

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for raw in output:
                line = json.loads(raw)
                if "ref" in line:
                    with self._lock:
                        bridge, future = self._replies.pop(line["ref"], (None, None))
                    if bridge is not None and future is not None:
                        bridge._soon(_settle, future, line)
                elif "ask" in line:
                    with self._lock:
                        bridge = self._bridges.get(line["session"])
                    if bridge is not None:
                        bridge._soon(bridge._asked, line)
                else:
                    self.unhandled.append(line["error"])
        self._process.wait()
        with self._lock:
            self._ended = True
            waiting, self._replies = list(self._replies.values()), {}
        for bridge, future in waiting:
            bridge._soon(_fail, future, self._death())

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as errors:
            for raw in errors:
                self._errors.append(raw.decode(errors="replace").rstrip())


def _settle(future: asyncio.Future[Any], line: Json) -> None:
    if future.done():
        return
    if "error" in line:
        future.set_exception(BridgeError(line["error"]))
    else:
        future.set_result(line["result"])


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


class Bridge:
    """A session of a bridge process; its channels and clients are its own and end with it.

    Leaving its block raises what an `Answer` raised, other than `Refused`.

    Args:
        process: Node; one of its own when there is none.
    """

    def __init__(self, process: BridgeProcess | None = None) -> None:
        self._process = process or BridgeProcess()
        self._own = process is None
        self._answers: dict[str, Answer] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._failures: list[Exception] = []

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._session = self._process._join(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            with contextlib.suppress(BridgeDied):
                await self._call("end")
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
        finally:
            self._process._leave(self._session)
            if self._own:
                await asyncio.to_thread(self._process.close)
        if self._failures and error is None:
            raise ExceptionGroup("answers to the JavaScript clients failed", self._failures)

    @property
    def pid(self) -> int:
        """Of Node."""
        return self._process.pid

    # -- channels

    async def open(
        self,
        channel: str,
        answer: Answer | None = None,
        *,
        readers: Literal["shared", "each"] = "shared",
        first_append_as_update: Literal["inflight-only", "always", "never"] = "inflight-only",
    ) -> None:
        """Open a channel for clients here.

        Args:
            channel: Its name.
            answer: What is asked for it. Without one, clients can only read.
            readers: `shared`: all get the same deliveries, and the bridge keeps history and makes first appends full
                updates. `each`: every client attaches, gets deliveries and pages history by itself, through `answer`.
            first_append_as_update: Of which messages, for `shared`.
        """
        if answer is not None:
            self._answers[channel] = answer
        await self._call("open", channel=channel, readers=readers, firstAppendAsUpdate=first_append_as_update)

    async def deliver(
        self, channel: str, *messages: Delivered, to: Sequence[int] | None = None, views: Sequence[str] = ()
    ) -> dict[str, list[View]]:
        """Deliver messages exactly as they are.

        Args:
            channel: On which.
            *messages: In order.
            to: Only to these attachments.
            views: Clients whose view after each message is wanted.
        """
        done = await self._call("deliver", channel=channel, messages=messages, to=to, views=views)
        return {name: [View.of(view) for view in seen] for name, seen in done["views"].items()}

    # -- clients

    async def client(
        self,
        client: str,
        channel: str,
        *,
        client_id: str,
        codec: Literal["ui", "tiny"] = "ui",
        history_page_size: int | None = None,
        endpoint: int | None = None,
    ) -> None:
        """Make and connect a client session.

        Args:
            client: How it is called here.
            channel: On which, opened before.
            client_id: Its own.
            codec: The one for UI messages, or the harness's own small one.
            history_page_size: Messages that it asks for at once.
            endpoint: Port of `ably_endpoint`: the real `ably` client on that channel there, instead of one here.
        """
        await self._call(
            "client",
            client=client,
            channel=channel,
            clientId=client_id,
            codec=codec,
            historyPageSize=history_page_size,
            endpoint=None if endpoint is None else {"port": endpoint},
        )

    async def view(self, client: str) -> View:
        """What it shows once everything delivered has arrived."""
        return View.of(await self._call("view", client=client))

    async def until(self, client: str, true: Callable[[View], object]) -> View:
        """Its view as soon as something is true of it.

        Raises:
            TimeoutError: It did not become so; the message holds the last view.
        """
        view = await self.view(client)
        try:
            async with asyncio.timeout(TIMEOUT):
                while not true(view):
                    view = View.of(await self._call("view", client=client, unlike=view.digest))
        except TimeoutError:
            raise TimeoutError(f"still not so: {view}") from None
        return view

    async def load_older(self, client: str, limit: int = 100) -> View:
        """Page history into its view."""
        return View.of(await self._call("load_older", client=client, limit=limit))

    async def send(
        self,
        client: str,
        text: str | None = None,
        *,
        message: Json | None = None,
        inputs: Sequence[Json] | None = None,
        options: Json | None = None,
    ) -> RunHandle:
        """Send an input; returns once the channel has taken it.

        Args:
            client: Which one.
            text: A user message of this text;
            message: or this message of its codec;
            inputs: or these events, or `{"factory": "createToolApprovalResponse", "args": [...]}` of its codec.
            options: Of the SDK: `runId`, `parent`, `forkOf`, `supersedes`.
        """
        return RunHandle.of(
            await self._call("send", client=client, text=text, message=message, inputs=inputs, options=options)
        )

    async def edit(self, client: str, target: str, text: str, *, options: Json | None = None) -> RunHandle:
        """Replace a message, on a new branch."""
        return RunHandle.of(await self._call("edit", client=client, target=target, text=text, options=options))

    async def regenerate(self, client: str, target: str, *, options: Json | None = None) -> RunHandle:
        """Ask for another reply in place of a message."""
        return RunHandle.of(await self._call("regenerate", client=client, target=target, options=options))

    async def run(self, run: RunHandle) -> RunHandle:
        """The run as it is now."""
        return RunHandle.of(await self._call("run", run=run.name))

    async def started(self, run: RunHandle) -> RunHandle:
        """The run once an agent has started it."""
        return RunHandle.of(await self._call("started", run=run.name))

    async def steer(self, run: RunHandle, text: str) -> tuple[str, str]:
        """Say something to a run that is active; returns a name for `outcome` and the serial."""
        done = await self._call("steer", run=run.name, text=text)
        return done["steer"], done["serial"]

    async def outcome(self, steer: str) -> Json:
        """What became of a steer, once known: `consumed`, ..."""
        return await self._call("outcome", steer=steer)

    async def cancel(self, run: RunHandle | str, *, client: str | None = None) -> None:
        """Cancel a run by its handle, or by its id from a client."""
        if isinstance(run, RunHandle):
            await self._call("cancel", run=run.name)
        else:
            await self._call("cancel", client=client, runId=run)

    async def select(self, client: str, target: str, index: int | None = None) -> tuple[int, int]:
        """Select a branch at a message; returns which is selected and how many there are."""
        done = await self._call("select", client=client, target=target, index=index)
        return done["index"], done["count"]

    async def lose_continuity(self, client: str) -> None:
        """As if it had attached again without continuity."""
        await self._call("lose_continuity", client=client)

    async def close(self, client: str) -> None:
        """Close a client."""
        await self._call("close", client=client)

    # -- scenarios

    async def scenario(
        self,
        name: str,
        *,
        mode: Literal["inflight-only", "always"] = "inflight-only",
        observer: bool = False,
        channel: str | None = None,
    ) -> Scenario:
        """Play a scenario of scenarios.mjs, with the unmodified agent and client.

        Args:
            name: Its name, as in those of the golden traces.
            mode: Which appends its hub delivers as full updates.
            observer: A client `observer` watches from the beginning.
            channel: Play it there, opened before, instead of on a hub of its own.
        """
        done = await self._call("scenario", name=name, mode=mode, observer=observer, channel=channel)
        return Scenario(
            published=done["published"],
            history=done["history"],
            result=done["result"],
            checks=done["checks"],
            clients=[
                ScenarioClient(
                    client_id=client["clientId"],
                    connection_id=client["connectionId"],
                    is_client=client["isClient"],
                    seen=client["seen"],
                )
                for client in done["clients"]
            ],
        )

    # -- lines

    async def _call(self, op: str, **arguments: Any) -> Any:
        given = {name: value for name, value in arguments.items() if value is not None}
        ref, reply = self._process._request(self, {"session": self._session, "op": op, **given})
        try:
            async with asyncio.timeout(TIMEOUT):
                return await reply
        except TimeoutError:
            raise TimeoutError(f"the bridge did not answer {op} within {TIMEOUT:g} s") from None
        finally:
            self._process._forget(ref)

    def _soon(self, call: Callable[..., object], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(call, *arguments)

    def _asked(self, line: Json) -> None:
        task = self._loop.create_task(self._answer(line))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, line: Json) -> None:
        ask = Ask(
            event=line["event"],
            channel=line["channel"],
            client_id=line.get("clientId"),
            messages=line.get("messages", ()),
            message=line.get("message", {}),
            attachment=line.get("attachment"),
            until_attach=line.get("untilAttach", False),
            limit=line.get("limit", 0),
            cursor=line.get("cursor"),
        )
        try:
            answer = self._answers.get(ask.channel)
            if answer is None:
                raise Refused(f"channel {ask.channel} was opened for reading only", 40160, 401)
            self._process._write({"ask": line["ask"], "result": await answer(ask)})
        except Exception as error:  # noqa: BLE001 - whatever it was: the client there waits, and the block raises it
            if not isinstance(error, Refused):
                self._failures.append(error)
            self._process._write(
                {
                    "ask": line["ask"],
                    "error": {
                        "message": f"{type(error).__name__}: {error}",
                        "code": error.code if isinstance(error, Refused) else 50000,
                        "statusCode": error.status_code if isinstance(error, Refused) else 500,
                    },
                }
            )
