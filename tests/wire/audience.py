"""Who watches a conversation: a client of this package from every moment of it on, and a JavaScript one in its place.

A `Seat` is a client of this package on a channel of the product. It is handed one mutation at a time, and what it was
given and what it showed is kept. `shown_in_javascript` gives exactly the same to the unmodified JavaScript client.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

import anyio
import anyio.abc
import msgspec

from stepwell.errors import StreamError
from stepwell.transport import ClientSession
from stepwell.wire import Channel, Cursor, Delivery, ErrorInfo, Gap, HistoryPage
from transport_kit import golden, steps
from wire.bridge import Ask, Bridge, Delivered, View
from wire.feed import delivered

T = TypeVar("T")
Shown = dict[str, Any]

_names = itertools.count(1)


class Seat:
    """A client that joins, reads all history at once, and then what comes.

    Attributes:
        pages: Of history, as it was given them.
        rows: Mutations, as it was given them.
        shown: What it showed: after reading history, then after each row.
        newest: The same in the end, with the newest alternative of the first message selected.
        version: Of the newest mutation that it has dealt with.
    """

    def __init__(self, channel: Channel, codec: Any) -> None:
        self._channel = channel
        self._errors: list[int] = []
        self._given: list[Delivery] = []  # not handed on yet
        self._news = anyio.Event()
        self._busy = False
        self.name = channel.name
        self.pages: list[HistoryPage] = []
        self.rows: list[Delivery] = []
        self.shown: list[Shown] = []
        self.newest: Shown = {}
        self.version = ""
        self._client: ClientSession[Any, Any] = ClientSession(self, codec, client_id="watcher")  # type: ignore[arg-type]
        self._client.on_error(self._on_error)

    async def sit(self, *, task_status: anyio.abc.TaskStatus[None]) -> None:
        async with self._client:
            await self._client.view.load_older(1_000)
            self.shown.append(self._now())
            task_status.started()
            await anyio.sleep_forever()

    async def until(self, version: str) -> None:
        while self.version < version:
            await self._news.wait()

    def end(self) -> None:
        """Nothing more comes."""
        view = self._client.view
        if view.messages:
            branch = view.branch(view.messages[0].codec_message_id)
            branch.select(len(branch.siblings))
        self.newest = self._now()

    def _on_error(self, error: Exception) -> None:
        assert isinstance(error, StreamError), error
        self._errors.append(int(error.ids["error_code"]))

    def _now(self) -> Shown:
        view, tree = self._client.view, self._client.tree
        now = {
            "messages": golden(view),
            "runs": [
                {
                    "runId": run.run_id,
                    "status": run.status,
                    "clientId": run.client_id,
                    "invocationId": run.invocation_id,
                    "steps": steps(run),
                    "error": run.error and _error(run.error.code, run.error.status_code, run.error.message),
                }
                for run in view.runs
            ],
            "steps": {run.run_id: steps(run) for run in tree.runs},
            "hasOlder": view.has_older,
            "errors": self._errors,
        }
        return msgspec.json.decode(msgspec.json.encode(now))  # as it is now

    # -- the channel, as its client sees it

    @contextlib.asynccontextmanager
    async def subscribe(self) -> AsyncGenerator[Seat]:
        async with self._channel.subscribe() as self._inner:
            yield self

    @property
    def start(self) -> Cursor:
        return self._inner.start

    async def read(self) -> Sequence[Delivery]:
        """One at a time: whoever asks for the next has dealt with the one before."""
        if self._busy:
            self._busy = False
            self.shown.append(self._now())
            self.version = self.rows[-1].version
            self._news.set()
            self._news = anyio.Event()
        while not self._given:
            for item in await self._inner.read():
                assert not isinstance(item, Gap)
                self._given.append(item)
        self.rows.append(self._given.pop(0))
        self._busy = True
        return self.rows[-1:]

    async def history(self, *, before: Cursor | None = None, limit: int = 100) -> HistoryPage:
        self.pages.append(await self._channel.history(before=before, limit=limit))
        return self.pages[-1]


class Audience:
    """Seats from the beginning of a channel on and, behind every write to it, one more."""

    def __init__(self, channel: Channel, codec: Callable[[], Any], tasks: anyio.abc.TaskGroup) -> None:
        self._channel = channel
        self._codec = codec
        self._tasks = tasks
        self._turn = anyio.Lock()
        self.seats: list[Seat] = []

    async def join(self) -> None:
        seat = Seat(self._channel, self._codec())
        await self._tasks.start(seat.sit)
        self.seats.append(seat)

    async def watch(self, write: Callable[[], Awaitable[T]]) -> T:
        """Make a write, let every seat see it, and add one. A write that was made is seen by all, whoever gives up."""
        async with self._turn:
            done: Any = await write()
            with anyio.CancelScope(shield=True):
                for seat in self.seats:
                    await seat.until(done if isinstance(done, str) else done[-1])
                await self.join()
        return done


@contextlib.asynccontextmanager
async def audience(channel: Channel, codec: Callable[[], Any]) -> AsyncGenerator[Audience]:
    """Whoever writes within the block writes by `Audience.watch`. Behind it the seats have seen everything."""
    async with anyio.create_task_group() as tasks:
        watching = Audience(channel, codec, tasks)
        await watching.join()
        yield watching
        for seat in watching.seats:
            seat.end()
        tasks.cancel_scope.cancel()


async def shown_in_javascript(bridge: Bridge, seat: Seat, codec: Any) -> tuple[list[View], View]:
    """What the JavaScript client shows in a seat: as `Seat.shown` and `Seat.newest`."""
    name = f"seat-{next(_names)}"
    attachments: list[int] = []

    async def answer(ask: Ask) -> Any:
        if ask.event == "attach":
            assert ask.attachment is not None
            attachments.append(ask.attachment)
        if ask.event != "history":
            return {}
        number = ask.cursor or 0
        items: list[Delivered] = [delivered(item) for item in seat.pages[number].items]
        return {"items": items} if number + 1 == len(seat.pages) else {"items": items, "next": number + 1}

    await bridge.open(name, answer, readers="each")
    await bridge.client(name, name, client_id="watcher", codec=codec)
    shown = [await bridge.load_older(name, 1_000)]
    seen = await bridge.deliver(name, *map(delivered, seat.rows), to=attachments, views=[name])
    shown += seen[name]
    if shown[-1].messages:
        target = shown[-1].messages[0]["codecMessageId"]
        _, count = await bridge.select(name, target)
        if count > 1:
            await bridge.select(name, target, count - 1)
    newest = await bridge.view(name)
    await bridge.close(name)
    return shown, newest


def assert_alike(mine: Shown, theirs: View, where: str) -> None:
    """The same messages, runs, steps and errors."""
    runs = [
        {
            **run,
            "steps": [_step(step) for step in run["steps"]],
            "error": (error := run.get("error")) and _error(error["code"], error["statusCode"], error["message"]),
        }
        for run in theirs.runs
    ]
    assert mine["messages"] == theirs.messages, where
    assert mine["runs"] == runs, where
    assert mine["hasOlder"] == theirs.has_older, where
    assert mine["errors"] == [error["code"] for error in theirs.errors], where
    for run_id, known in theirs.steps.items():
        assert mine["steps"][run_id] == [_step(step) for step in known], where


def _error(code: int, status_code: int, message: str) -> list[Any]:
    """Where an agent says nothing of an error, each package has words of its own."""
    return [code, status_code, None if message in (ErrorInfo().message, "agent reported an error") else message]


def _step(step: dict[str, Any]) -> dict[str, Any]:
    return {"stepClientId": None, **step}
