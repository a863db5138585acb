"""What a view that has paged shows of what is said afterwards."""

import anyio
import pytest

from stepwell.channels import MemoryChannels
from stepwell.transport import ClientSession
from stepwell.transport.codecs import TextCodec

pytestmark = pytest.mark.anyio


async def test_an_input_stays_shown_when_its_echo_gives_it_its_place() -> None:
    channel = await MemoryChannels().open("c")
    codec = TextCodec()
    async with ClientSession(channel, codec) as client, ClientSession(channel, codec) as other:
        await client.view.load_older(50)  # of an empty channel: from here on only what comes live is shown
        changes = other.view.changes()
        await client.view.send(codec.create_user_message("hello"))
        assert [one.message.text for one in client.view.messages] == ["hello"]
        while not other.view.messages:
            await anext(changes)
        await anyio.wait_all_tasks_blocked()  # this client has its echo too
        assert [one.message.text for one in client.view.messages] == ["hello"]
