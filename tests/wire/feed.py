"""JavaScript clients on a channel of the product.

Each attaches with a subscription of its own, pages the channel's history and publishes to it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncGenerator
from typing import Any

from stepwell.wire import Channel, Cursor, Delivery, Gap, WireMessage
from wire.bridge import Ask, Bridge, Delivered


def delivered(item: Delivery) -> Delivered:
    """A delivery as the JavaScript client library hands it to a subscriber."""
    message: Delivered = {
        "serial": item.serial,
        "version": {"serial": item.version, "timestamp": item.timestamp},
        "action": f"message.{item.action}",
        "timestamp": item.timestamp,
        "name": item.name,
        "data": item.data,
        "extras": item.extras,
        "clientId": item.client_id,
    }
    return {key: value for key, value in message.items() if value is not None}


class Reader:
    """A client's attachment. Versions grow as text."""

    def __init__(self) -> None:
        self.start: Cursor | None = None
        self.wanted = ""
        """The version of the last change that was made in JavaScript while it was attached."""
        self.delivered = ""


class Feed:
    """Answers for one channel. Appends of everybody in JavaScript to one message are numbered together, from 1."""

    def __init__(self, bridge: Bridge, channel: Channel, tasks: asyncio.TaskGroup) -> None:
        self._bridge = bridge
        self._channel = channel
        self._tasks = tasks
        self._readers: dict[int, Reader] = {}
        self._pumps: dict[int, asyncio.Task[None]] = {}
        self._news = asyncio.Condition()
        self._appends: Counter[str] = Counter()
        self._turn = asyncio.Lock()  # what was asked first is done first, as on a connection

    async def answer(self, ask: Ask) -> Any:
        number = ask.attachment
        match ask.event:
            case "attach":
                assert number is not None
                started = asyncio.get_running_loop().create_future()
                reader = Reader()
                self._pumps[number] = self._tasks.create_task(self._pump(number, reader, started))
                reader.start = await started
                self._readers[number] = reader
                return {}
            case "detach":
                assert number is not None
                self._pumps.pop(number).cancel()
                self._readers.pop(number, None)
                async with self._news:
                    self._news.notify_all()
                return {}
            case "history":
                return await self._history(ask)
            case "quiet":
                async with self._news:
                    await self._news.wait_for(self._quiet)
                return {}
        async with self._turn:
            answer, version = await self._change(ask)
            for reader in self._readers.values():
                reader.wanted = version
            return answer

    def _quiet(self) -> bool:
        return all(reader.delivered >= reader.wanted for reader in self._readers.values())

    async def _change(self, ask: Ask) -> tuple[Any, str]:
        if ask.event == "publish":
            messages = [
                WireMessage(
                    name=message["name"],
                    data=message.get("data"),
                    extras=message.get("extras"),
                    client_id=message.get("clientId", ask.client_id),
                )
                for message in ask.messages
            ]
            serials = await self._channel.publish(messages)
            return {"serials": serials}, serials[-1]
        serial, data, extras = (ask.message.get(key) for key in ("serial", "data", "extras"))
        assert serial is not None
        if ask.event == "update":
            version = await self._channel.update(serial, data, extras or {})
        else:
            seq = self._appends[serial] + 1
            version = await self._channel.append(serial, data or "", extras, seq=seq)
            self._appends[serial] = seq
        return {"versionSerial": version}, version

    async def _pump(self, number: int, reader: Reader, started: asyncio.Future[Cursor]) -> None:
        async with self._channel.subscribe() as subscription:
            started.set_result(subscription.start)
            while True:
                items = [item for item in await subscription.read() if not isinstance(item, Gap)]
                if items:
                    await self._bridge.deliver(self._channel.name, *map(delivered, items), to=[number])
                    async with self._news:
                        reader.delivered = items[-1].version
                        self._news.notify_all()

    async def _history(self, ask: Ask) -> Any:
        assert ask.attachment is not None
        first = self._readers[ask.attachment].start if ask.until_attach else None
        page = await self._channel.history(before=ask.cursor or first, limit=ask.limit)
        items = [delivered(item) for item in page.items]
        return {"items": items} if page.next is None else {"items": items, "next": page.next}


@contextlib.asynccontextmanager
async def feed(bridge: Bridge, channel: Channel) -> AsyncGenerator[None]:
    """Open the channel in the bridge, under its name. Close its clients before the block ends."""
    async with asyncio.TaskGroup() as tasks:
        answers = Feed(bridge, channel, tasks)
        await bridge.open(channel.name, answers.answer, readers="each")
        try:
            yield
        finally:
            for task in answers._pumps.values():
                task.cancel()
