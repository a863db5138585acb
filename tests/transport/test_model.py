"""Random conversations: whoever reads the channel, however, shows what a model computes from the whole log.

See `transport_model`.
"""

from __future__ import annotations

import contextlib
import json
import os
from random import Random
from typing import Any

import anyio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stepwell.transport import ClientSession, ConversationTree
from stepwell.transport.codecs import TextCodec
from stepwell.wire import Delivery
from transport_kit import LogChannel, settled
from transport_model import BEGINNING, OFTEN, Model, Talk


class Reader:
    """A client that has joined, with what it must show."""

    def __init__(self, session: ClientSession[Any, Any], *, paged: bool) -> None:
        self.session = session
        self.paged = paged
        self.pins: dict[Any, str] = {}
        self.before: list[str] = []

    def look(self, model: Model) -> None:
        model.pin(self.pins, self.before)
        self.before = [key for key, _ in model.visible(self.pins)]

    def check(self, model: Model) -> None:
        assert shown(self.session.view) == model.shown(self.pins)
        self.check_runs(model)

    def check_runs(self, model: Model) -> None:
        assert infos(self.session.tree) == model.infos()


def shown(view: Any) -> list[tuple[str, str]]:
    return [(one.codec_message_id, one.message.text) for one in view.messages]


def infos(tree: ConversationTree[Any, Any]) -> list[Any]:
    return [
        (
            run.run_id,
            run.client_id,
            run.invocation_id,
            run.status,
            [(one.step_id, one.status, one.attempt_count, one.step_client_id) for one in run.steps],
        )
        for run in tree.runs
    ]


EXAMPLES = int(os.environ.get("STEPWELL_TRANSPORT_EXAMPLES", "60"))

JOIN, AGAIN, GAP = 15, 16, 17

schedules = st.lists(
    st.tuples(st.sampled_from([*OFTEN, JOIN, JOIN, AGAIN, GAP]), st.integers(0, 2**31)), min_size=15, max_size=60
).map(lambda rest: [*((kind, 0) for kind in BEGINNING), *rest])


async def play(schedule: list[tuple[int, int]]) -> None:
    channel = LogChannel()
    talk = Talk(channel)
    async with contextlib.AsyncExitStack() as stack:
        enter = stack.enter_async_context
        first = Reader(await enter(ClientSession(channel, TextCodec())), paged=True)
        everybody = [first]
        for kind, seed in schedule:
            random = Random(seed)
            if kind < JOIN:
                length = len(channel.log)
                talk.act(kind, random)
                # One mutation after the other: what a view shows in between is part of the rules of selection.
                for upto in range(length + 1, len(channel.log) + 1):
                    model = Model(channel.log[:upto])
                    for reader in everybody:
                        reader.look(model)
            elif kind == JOIN and len(everybody) < 6:
                session = await enter(ClientSession(channel, TextCodec(), history_page=random.choice([1, 2, 5, 100])))
                reader = Reader(session, paged=random.random() < 0.6)
                if reader.paged:
                    await session.view.load_older(10_000)
                    reader.look(Model(channel.log))
                everybody.append(reader)
            elif kind == AGAIN and channel.log:
                # The same again, as a replay at the seam of two subscriptions would have it.
                subscription = random.choice(channel.subscriptions)
                again = random.randrange(len(channel.log))
                if again < subscription.begin:
                    continue
                subscription.pending.extend(channel.log[again : again + 3])
                channel.wake()
            elif kind == GAP:
                channel.lose()
            await settled()
            model = Model(channel.log)
            for reader in everybody:
                if reader.paged:
                    reader.check(model)
        model = Model(channel.log)
        for reader in everybody:
            await reader.session.view.load_older(10_000)
            reader.check_runs(model)
            if not talk.forked:
                assert shown(reader.session.view) == model.shown({})


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(schedules)
def test_every_reader_shows_what_the_model_shows_after_every_mutation(schedule: list[tuple[int, int]]) -> None:
    anyio.run(play, schedule)


def shuffled(log: list[Delivery], random: Random) -> list[Delivery]:
    """Another order of arrival, each message's own mutations in theirs; some come twice."""
    order = [random.random() for _ in log]
    last: dict[str, float] = {}
    for place, row in enumerate(log):
        order[place] = last[row.serial] = max(order[place], last.get(row.serial, 0.0))
    out = [row for _, row in sorted(zip(order, log, strict=True), key=lambda one: one[0])]
    for _ in range(random.randrange(3)):
        if out:
            place = random.randrange(len(out))
            out.insert(random.randrange(place, len(out)) + 1, out[place])
    return out


@settings(max_examples=2 * EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(schedules, st.integers(0, 2**31))
def test_the_tree_does_not_depend_on_the_order_of_arrival(schedule: list[tuple[int, int]], seed: int) -> None:
    async def run() -> None:
        channel = LogChannel()
        talk = Talk(channel)
        for kind, own in schedule:
            talk.act(kind, Random(own))
        model = Model(channel.log)
        tree: ConversationTree[Any, Any] = ConversationTree(TextCodec())
        for delivery in shuffled(channel.log, Random(seed)):
            tree.apply(delivery)
        path = tree.visible(lambda group: group[-1])
        assert [node.key for node in path] == [key for key, _ in model.visible({})]
        for node, (_, wanted) in zip(path, model.visible({}), strict=True):
            assert [(one.codec_message_id, one.message.text) for one in node.messages] == model.messages_of(wanted)
        assert infos(tree) == model.infos(), json.dumps([str(one) for one in channel.log])

    anyio.run(run)
