"""The conversation: a forest of inputs and of the runs that answer them, folded from a channel's deliveries.

The tree is a function of the set of deliveries it was given. Their order matters only where the protocol has no other
measure: a delivery that comes outside of the reorder window is folded where it comes.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Container, Generator, Sequence
from typing import Any, Generic, TypeVar, cast

import msgspec

from stepwell.wire import Delivery, H, Headers, Lifecycle, Name, RunEvent, StepEvent, parse_lifecycle, transport_headers

from ._changes import BulkChange, OutputChange, RunChange, StepChange, StructureChange, TreeChange
from ._codec import Codec, Direction
from ._nodes import InputNode, Node, RunInfo, RunNode

__all__ = ["ConversationTree"]

M = TypeVar("M")
P = TypeVar("P")


def _order_of(node: Node[Any, Any]) -> tuple[bool, str, int]:
    assert node.place is not None
    return node.place[1]


class ConversationTree(Generic[M, P]):
    """See the module.

    Args:
        codec: Decodes and folds.
        reorder_window: Seconds of channel time for which the events of a finished run are kept. A superseding start
            that comes later cannot take the old output away any more.

    The tree is read at any time and only by the session written to. Nodes it returns are live: they change.
    """

    def __init__(self, codec: Codec[M, P], *, reorder_window: float = 120.0) -> None:
        self.codec = codec
        self._reorder_window = reorder_window
        self._listeners: list[Callable[[TreeChange], object]] = []
        self._decoder = codec.create_decoder()
        self._runs: dict[str, RunNode[M, P]] = {}
        self._inputs: dict[str, InputNode[M, P]] = {}
        self._order: list[Node[M, P]] = []
        self._children: dict[str | None, list[Node[M, P]]] = {}  # by the parent's id as given, known or not
        self._owners: dict[str, Node[M, P]] = {}  # codec-message-id -> the node that it belongs to
        self._answers: dict[str, RunNode[M, P]] = {}  # input's codec-message-id -> a run that says it answers it
        self._superseded: set[str] = set()  # runs that a tool result's fork replaced
        self._input_events: dict[str, Delivery] = {}
        self._local: dict[str, tuple[Any, Headers]] = {}  # inputs of this client that have not come back yet
        self._count = 0
        self._live = True
        self._clock = 0  # channel time, milliseconds
        self._finished: deque[RunNode[M, P]] = deque()

    # -- reading

    def listen(self, listener: Callable[[TreeChange], object]) -> Callable[[], None]:
        """Call `listener` with every change, at once; it must not raise, and must not wait.

        Returns:
            Call it to stop. May be called again.
        """
        self._listeners.append(listener)

        def stop() -> None:
            with contextlib.suppress(ValueError):
                self._listeners.remove(listener)

        return stop

    @property
    def live(self) -> bool:
        """Whether what is told comes from the subscription; false within `history`."""
        return self._live

    @property
    def runs(self) -> list[RunInfo]:
        """Every run, in the order of the channel, whatever branch it is on."""
        return [node.info() for node in self._order if isinstance(node, RunNode)]

    def run(self, run_id: str) -> RunInfo | None:
        """A run as it is now; None if there is none."""
        node = self.run_node(run_id)
        return node.info() if node is not None else None

    def run_node(self, run_id: str) -> RunNode[M, P] | None:
        """A run's node; None if there is none."""
        node = self._runs.get(run_id)
        return node if node is not None and node.place is not None else None

    def node(self, key: str) -> Node[M, P] | None:
        """The run of that id, or the input of that `codec-message-id`."""
        return self.run_node(key) or self._inputs.get(key)

    def node_of(self, codec_message_id: str) -> Node[M, P] | None:
        """The node that a message belongs to; None if it was not seen."""
        return self._owners.get(codec_message_id)

    def siblings(self, node: Node[M, P]) -> list[Node[M, P]]:
        """The nodes of which a branch holds one, oldest first, with `node` itself.

        Runs are siblings if they answer the same message; inputs if one replaces the other, by any number of edits.
        A run that was superseded by a tool result's fork is in no group.
        """
        group = self._children.get(node.parent, [])
        if len(group) > 1:
            if isinstance(node, RunNode):
                group = [one for one in group if isinstance(one, RunNode) and one.key not in self._superseded]
            else:
                root = self._first_version(node)
                group = [one for one in group if self._first_version(one) is root]
        return sorted(group, key=_order_of)

    def replies(self, codec_message_id: str) -> list[RunNode[M, P]]:
        """The runs that answer a message, oldest first, without superseded ones."""
        found = [
            node
            for node in self._children.get(codec_message_id, ())
            if isinstance(node, RunNode) and node.key not in self._superseded
        ]
        return sorted(found, key=_order_of)

    def has_replies(self, codec_message_id: str) -> bool:
        """Whether `replies` may find any: cheap."""
        return codec_message_id in self._children

    def visible(self, choose: Callable[[Sequence[Node[M, P]]], Node[M, P]]) -> list[Node[M, P]]:
        """The nodes of one branch, in order.

        Args:
            choose: Which of a group of siblings; called for groups of more than one, with the same result each time.
        """
        path: set[Node[M, P]] = set()
        found: list[Node[M, P]] = []
        for node in self._order:
            # A parent that was not seen may come with older history: until then the node is a root.
            parent = self._owners.get(node.parent) if node.parent is not None else None
            if (parent is not None and parent not in path) or node.key in self._superseded:
                continue
            if len(self._children[node.parent]) > 1:
                group = self.siblings(node)
                if len(group) > 1 and choose(group) is not node:
                    continue
            path.add(node)
            found.append(node)
        return found

    def extends(self, node: Node[M, P], branch: Container[Node[M, P]]) -> bool:
        """Whether a node comes after all others, has no siblings, and goes on from a branch (or from nothing known).

        Then `visible` gives the same as before with the node behind it, and costs more.
        """
        if not self._order or self._order[-1] is not node or node.key in self._superseded:
            return False
        parent = self._owners.get(node.parent) if node.parent is not None else None
        return (parent is None or parent in branch) and len(self._children[node.parent]) == 1

    def input_event(self, event_id: str) -> Delivery | None:
        """The input of that `event-id`: the first of its parts. None if it was not seen."""
        return self._input_events.get(event_id)

    def latest_step_client_id(self, run_id: str) -> str | None:
        """The `step-client-id` of the latest start in a run that names one."""
        node = self._runs.get(run_id)
        return node.latest_step_client_id() if node is not None else None

    def highest_step_index(self, run_id: str, invocation_id: str) -> int | None:
        """The highest n of the run's steps called `<invocation_id>-step-<n>`; None if there is none."""
        node = self._runs.get(run_id)
        prefix = f"{invocation_id}-step-"
        names = [step.step_id.removeprefix(prefix) for step in node.steps] if node is not None else []
        return max((int(name) for name in names if name.isascii() and name.isdigit()), default=None)

    # -- writing, by the session

    def apply(self, delivery: Delivery) -> Lifecycle | None:
        """Take one delivery in. It may have been taken in before.

        Returns:
            The delivery, if it is a lifecycle message.
        """
        said = parse_lifecycle(delivery)
        if isinstance(said, RunEvent):
            self._on_run(said)
        elif isinstance(said, StepEvent):
            self._on_step(said)
        elif said is None:
            self._on_content(delivery)
        return said

    @contextlib.contextmanager
    def history(self) -> Generator[None]:
        """Within it a page of history is applied, oldest first."""
        self._tell(BulkChange(begins=True, gap=False))
        self._live = False
        try:
            yield
        finally:
            self._live = True
            self._tell(BulkChange(begins=False, gap=False))

    def replace(self, other: ConversationTree[M, P]) -> None:
        """Become what another tree is, at once: after a gap. Inputs that have not come back yet are kept."""
        self._tell(BulkChange(begins=True, gap=True))
        listeners, local = self._listeners, self._local
        vars(self).update(vars(other))
        self._listeners = listeners
        for message_id, (event, headers) in local.items():
            if message_id not in self._owners:
                self._insert_local(message_id, event, headers)
        self._tell(BulkChange(begins=False, gap=True))

    def insert_local(self, event: Any, headers: Headers) -> Node[M, P]:
        """Show an input of this client before it comes back. Its echo replaces it, whenever it comes.

        Args:
            event: The input, of the codec.
            headers: As it will be published with.
        """
        node, created = self._insert_local(headers[H.CODEC_MESSAGE_ID], event, headers)
        if created:
            self._tell(StructureChange(node=node))
        self._tell(OutputChange(node, None, [event], (), True))
        return node

    def remove_local(self, codec_message_id: str) -> None:
        """Take an input back that could not be published; nothing happens if it has come back already."""
        if self._local.pop(codec_message_id, None) is None:
            return
        node = self._owners[codec_message_id]
        node.unseed(codec_message_id)
        if isinstance(node, InputNode) and node.serial is None:
            del self._inputs[node.key], self._owners[codec_message_id]
            self._unfile(node)
            self._tell(StructureChange(node=node))
        self._tell(OutputChange(node, None, (), (), True))

    def _insert_local(self, message_id: str, event: Any, headers: Headers) -> tuple[Node[M, P], bool]:
        run_id = headers.get(H.RUN_ID)
        node: Node[M, P] | None = self.run_node(run_id) if run_id is not None else self._inputs.get(message_id)
        created = node is None
        if node is None:
            node = self._new_input(message_id, headers)
            self._file(node)
        self._local[message_id] = (event, headers)
        self._owners[message_id] = node
        node.seed(message_id, event)
        return node, created

    # -- lifecycle

    def _on_run(self, event: RunEvent) -> None:
        run = self._run(event.run_id)
        renamed = None
        if event.verb == "start" and event.input_codec_message_id is not None:
            renamed = self._answer(run, event.input_codec_message_id)
        if run.on_event(event):
            self._settle(run, renamed, event.timestamp)
            self._tell(RunChange(run, event, self._live))

    def _on_step(self, event: StepEvent) -> None:
        run = self._run(event.run_id)
        changed = run.on_step(event)
        self._settle(run, None, event.timestamp)
        self._tell(StepChange(run, event, self._live))
        if changed:
            self._tell(OutputChange(run, None, (), (), self._live))

    # -- content

    def _on_content(self, delivery: Delivery) -> None:
        headers = transport_headers(delivery.extras)
        if delivery.name == Name.INPUT:
            self._index_input(headers, delivery)
        decoded = self._decoder.decode(delivery)
        run_id, message_id = headers.get(H.RUN_ID), headers.get(H.CODEC_MESSAGE_ID)
        events: list[tuple[Direction, Any]] = [("input", event) for event in decoded.inputs]
        for event in decoded.outputs:
            events.append(("output", event))  # noqa: PERF401 - one list
        if not events:
            return
        node: Node[M, P]
        renamed = None
        if run_id is not None:
            node, renamed = self._run_of_output(run_id, headers, delivery)
        elif message_id is None or not decoded.inputs:
            return
        elif headers.get(H.ROLE) == "user":
            node = self._inputs.get(message_id) or self._new_input(message_id, headers)
            if node.serial is None or delivery.serial < node.serial:
                node.serial = delivery.serial
        else:
            node = self._fork(message_id, headers, delivery)
        if message_id is not None:
            self._owners[message_id] = node
            if self._local:
                self._local.pop(message_id, None)
        changed = node.take(
            delivery.serial,
            delivery.version,
            message_id or "",
            events,
            self._attempt(node, headers),
            streamed=headers.get(H.STREAM) == "true",
        )
        self._settle(node, renamed, delivery.timestamp)
        if changed:
            self._tell(OutputChange(node, delivery, decoded.inputs, decoded.outputs, self._live))

    def _run_of_output(self, run_id: str, headers: Headers, delivery: Delivery) -> tuple[RunNode[M, P], str | None]:
        run = self._run(run_id)
        answered = headers.get(H.INPUT_CODEC_MESSAGE_ID)
        renamed = None
        if answered is not None and self._answers.get(answered) is not run:
            renamed = self._answer(run, answered)
        run.begin(delivery.serial, headers)
        stamp = headers.get(H.STEER_CODEC_MESSAGE_IDS)
        if stamp is not None:
            run.answered.update(_ids(stamp))
        return run, renamed

    def _attempt(self, node: Node[M, P], headers: Headers) -> tuple[str, str] | None:
        step_id, start_serial = headers.get(H.STEP_ID), headers.get(H.STEP_START_SERIAL)
        if step_id is None or start_serial is None or not isinstance(node, RunNode):
            return None
        return node.attempt(step_id, start_serial)

    def _index_input(self, headers: Headers, delivery: Delivery) -> None:
        event_id = headers.get(H.EVENT_ID)
        if event_id is not None:
            known = self._input_events.get(event_id)
            if known is None or delivery.serial < known.serial:
                self._input_events[event_id] = delivery

    # -- nodes

    def _number(self) -> int:
        self._count += 1
        return self._count

    def _run(self, run_id: str) -> RunNode[M, P]:
        """The run, made if it must be. It is in the tree only with the first message that makes a run."""
        run = self._runs.get(run_id)
        if run is None:
            run = self._runs[run_id] = RunNode(self.codec, run_id, self._number())
        return run

    def _new_input(self, message_id: str, headers: Headers) -> InputNode[M, P]:
        node = self._inputs[message_id] = InputNode(self.codec, message_id, self._number())
        node.parent = headers.get(H.PARENT)
        node.fork_of = headers.get(H.FORK_OF)
        return node

    def _fork(self, message_id: str, headers: Headers, delivery: Delivery) -> RunNode[M, P]:
        """The run that a tool result begins: until an agent takes it up it goes by the input's id."""
        replaced = headers.get(H.SUPERSEDES)
        if replaced is not None and replaced not in self._superseded:
            self._superseded.add(replaced)
            self._tell(StructureChange(node=self._runs.get(replaced)))
        run = self._answers.get(message_id) or self._run(message_id)
        run.begin(delivery.serial, headers)
        return run

    def _answer(self, run: RunNode[M, P], message_id: str) -> str | None:
        """Note that a run answers an input. If the input is a fork, the run takes its place: return the fork's key."""
        self._answers.setdefault(message_id, run)
        fork = self._runs.get(message_id)
        if fork is None or fork is run:
            return None
        del self._runs[message_id]
        self._unfile(fork)
        self._answers[message_id] = run
        run.absorb(fork)
        for entry in fork.log:
            self._owners[entry.message_id] = run
        return message_id

    def _first_version(self, node: Node[M, P]) -> Node[M, P]:
        """The earliest input that an input replaces, over any number of edits, as far as they were seen."""
        passed = {node}
        while isinstance(node, InputNode) and node.fork_of is not None:
            before = self._inputs.get(node.fork_of)
            if before is None or before in passed or before.parent != node.parent:
                break
            passed.add(before)
            node = before
        return node

    def _settle(self, node: Node[M, P], renamed: str | None, timestamp: int) -> None:
        """File the node where it belongs now, and let time pass."""
        if isinstance(node, RunNode):
            node.last_activity = max(node.last_activity, timestamp)
            if not node.queued and not node.log.swept and node.settled:
                node.queued = True
                self._finished.append(node)
            if not node.known:
                return
        if node.place != node.where():
            self._unfile(node)
            self._file(node)
            self._tell(StructureChange(node=node, renamed=renamed))
        elif renamed is not None:
            self._tell(StructureChange(node=node, renamed=renamed))
        if timestamp > self._clock:
            self._clock = timestamp
            self._sweep()

    def _file(self, node: Node[M, P]) -> None:
        node.place = node.where()
        insort(self._order, node, key=_order_of)
        self._children.setdefault(node.parent, []).append(node)

    def _unfile(self, node: Node[M, P]) -> None:
        if node.place is None:
            return
        parent, order = node.place
        del self._order[bisect_left(self._order, order, key=_order_of)]
        self._children[parent].remove(node)
        if not self._children[parent]:
            del self._children[parent]
        node.place = None

    def _sweep(self) -> None:
        """Empty the logs of finished runs.

        Only when channel time moves on: an older page of history, which has older times, is never cut in two by it.
        """
        while self._finished:
            run = self._finished[0]
            if run.last_activity + self._reorder_window * 1000 >= self._clock:
                return
            self._finished.popleft()
            run.queued = False
            if run.settled:
                run.sweep()

    def _tell(self, change: TreeChange) -> None:
        for listener in tuple(self._listeners):
            listener(change)


def _ids(stamp: str) -> list[str]:
    """The ids in a stamp; none in one that cannot be read."""
    try:
        ids = msgspec.json.decode(stamp)
    except (msgspec.DecodeError, TypeError):
        return []
    return [one for one in cast("list[Any]", ids) if isinstance(one, str)] if isinstance(ids, list) else []
