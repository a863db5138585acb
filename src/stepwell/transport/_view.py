"""What a client shows: one branch of the conversation, and the ways to say something in it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import anyio
import msgspec

from stepwell.errors import MisuseError, SessionClosedError
from stepwell.wire import H

from ._changes import BulkChange, OutputChange, StructureChange, TreeChange
from ._codec import CodecMessage
from ._nodes import InputNode, RunInfo, RunNode
from ._selection import BranchPoint, Selection
from ._window import Window

if TYPE_CHECKING:
    from ._client import ClientSession
    from ._handle import ClientRun

__all__ = ["BranchSelection", "View", "ViewChange", "ViewChanges"]

M = TypeVar("M")
P = TypeVar("P")

_WALK = 50
"""Messages that `load_until` reveals at once."""


class ViewChange(msgspec.Struct, frozen=True):
    """Something that a view shows changed; several changes are told as one to who is slow.

    Attributes:
        keys: Ids of the runs, and `codec-message-id`s of the inputs, whose content, status or steps changed.
        structure: Messages may have come, gone or moved.
        gap: Part of the channel's log was gone, and the conversation was built anew from a snapshot.
    """

    keys: frozenset[str]
    structure: bool
    gap: bool


class ViewChanges:
    """The changes of a view from the call of `View.changes` on. One task at a time; ends when the view is closed.

    It holds no more than one pending change, however slow its reader is.
    """

    def __init__(self) -> None:
        self._keys: set[str] = set()
        self._structure = False
        self._gap = False
        self._pending = anyio.Event()
        self._closed = False

    def note(self, key: str | None, *, structure: bool = False, gap: bool = False) -> None:
        """Add a change. Called by the view."""
        if key is not None:
            self._keys.add(key)
        self._structure = self._structure or structure
        self._gap = self._gap or gap
        if not self._pending.is_set():
            self._pending.set()

    def end(self) -> None:
        """No more changes. Called by the view."""
        self._closed = True
        self._pending.set()

    def __aiter__(self) -> ViewChanges:
        """Itself."""
        return self

    async def __anext__(self) -> ViewChange:
        """Wait for the next change. Cancelling it loses nothing."""
        await self._pending.wait()
        if not (self._keys or self._structure or self._gap):
            raise StopAsyncIteration  # closed, and everything before it was told
        change = ViewChange(frozenset(self._keys), self._structure, self._gap)
        self._keys.clear()
        self._structure = self._gap = False
        if not self._closed:
            self._pending = anyio.Event()
        return change


class BranchSelection(Generic[M]):
    """The alternatives of a message, and which of them a view shows, as they were when it was asked for.

    Attributes:
        siblings: Their first messages, oldest first: edits of an input, or answers made anew.
        index: Which one is shown.
    """

    def __init__(self, siblings: Sequence[M], index: int, select: Callable[[int], None]) -> None:
        self.siblings = siblings
        self.index = index
        self._select = select

    @property
    def has_siblings(self) -> bool:
        """Whether there is anything to select."""
        return len(self.siblings) > 1

    @property
    def selected(self) -> M | None:
        """The one that is shown; None for a message that was not seen."""
        return self.siblings[self.index] if self.siblings else None

    def select(self, index: int) -> None:
        """Show another one in this view from now on. Beyond the ends, the first or the last is taken."""
        if self.has_siblings:
            self._select(max(0, min(index, len(self.siblings) - 1)))


class View(Generic[M, P]):
    """One branch of a session's conversation. Made by `ClientSession.create_view`.

    Each view has its own selection and its own paging. Superseded output is never in it.
    """

    def __init__(self, session: ClientSession[M, P]) -> None:
        self._session = session
        self._tree = session.tree
        self._selection = Selection(self._tree)
        self._window = Window(self._tree, self._selection)
        self._readers: weakref.WeakSet[ViewChanges] = weakref.WeakSet()
        self._turn = anyio.Lock()
        self._closed = False
        self._stop = self._tree.listen(self._on_change)

    # -- reading

    @property
    def messages(self) -> Sequence[CodecMessage[M]]:
        """The messages of the branch, oldest first, from the oldest that was loaded on. Not changed afterwards."""
        return self._window.messages

    @property
    def runs(self) -> list[RunInfo]:
        """The runs of the branch."""
        return [node.info() for node in self._window.shown if isinstance(node, RunNode)]

    def run(self, run_id: str) -> RunInfo | None:
        """Any run of the conversation; None if it was not seen."""
        return self._tree.run(run_id)

    def run_of(self, codec_message_id: str) -> RunInfo | None:
        """The run that a message belongs to; of an input, the one that answers it and is selected."""
        node = self._tree.node_of(codec_message_id)
        if isinstance(node, InputNode):
            replies = self._tree.replies(codec_message_id)
            node = self._selection.choose(replies) if replies else None
        return node.info() if isinstance(node, RunNode) else None

    def changes(self) -> ViewChanges:
        """The changes from now on, to be iterated over: `async for change in view.changes()`."""
        changes = ViewChanges()
        self._readers.add(changes)
        if self._closed:
            changes.end()
        return changes

    # -- older messages

    @property
    def has_older(self) -> bool:
        """Whether `load_older` may find any."""
        return self._window.available > 0 or self._session.may_have_older

    async def load_older(self, limit: int = 10) -> Sequence[CodecMessage[M]]:
        """Reveal exactly `limit` more messages, or as many as there are.

        One caller at a time, others wait. Cancelled, what was read so far is kept and revealed by the next call.

        Returns:
            They, oldest first.

        Raises:
            MisuseError: The limit is not a positive number.
            HistoryFetchError: A page could not be read; calling again goes on from there.
            SessionClosedError, ChannelNotReadyError: The session is not connected.
        """
        if limit < 1:
            raise MisuseError(f"A limit of {limit} messages: pass at least 1.")
        async with self._turn:
            return await self._load(limit)

    async def _load(self, limit: int) -> Sequence[CodecMessage[M]]:
        window, history = self._window, self._session.history
        shown = {one.codec_message_id for one in window.messages}
        window.grown = 0
        while window.grown < limit:
            await history.load_until(lambda: window.grown + window.available >= limit)
            window.grown += (revealed := window.reveal(limit - window.grown))
            if not revealed:
                break
        self._note(None, structure=True)
        return [one for one in window.messages if one.codec_message_id not in shown]

    async def load_until(self, found: Callable[[CodecMessage[M]], bool]) -> Sequence[CodecMessage[M]]:
        """Load older messages until one is known, for whoever keeps the older ones elsewhere.

        Args:
            found: Whether a message is known. The newest such message ends the search: it and all older ones are
                hidden.

        Returns:
            The messages behind it, which are what the view shows then; all, if none is known.

        Raises:
            HistoryFetchError, SessionClosedError, ChannelNotReadyError: As `load_older`.
        """
        async with self._turn:
            part = self.messages
            while True:
                known = next((i for i in range(len(part) - 1, -1, -1) if found(part[i])), None)
                if known is not None:
                    self._window.hide(known + 1)
                    break
                if not (self.has_older and (part := await self._load(_WALK))):
                    break
            self._note(None, structure=True)
            return self.messages

    # -- branches

    def branch(self, codec_message_id: str) -> BranchSelection[M]:
        """The alternatives of a message of the conversation. A message without any is its only one."""
        point = self._selection.point(codec_message_id)
        if point is not None:

            def select(index: int, point: BranchPoint[M, P] = point) -> None:
                self._selection.select_at(point, index)
                self._window.show_from(point.nodes[index])
                self._note(None, structure=True)

            return BranchSelection([one.message for one in point.messages], self._selection.index(point), select)
        node = self._tree.node_of(codec_message_id)
        own = [one.message for one in node.messages if one.codec_message_id == codec_message_id] if node else []
        return BranchSelection(own[:1], 0, lambda _: None)

    # -- saying something

    async def send(
        self,
        inputs: Any,
        *,
        run_id: str | None = None,
        parent: str | None = None,
        fork_of: str | None = None,
        role: str = "user",
        supersedes: str | None = None,
    ) -> ClientRun[M, P]:
        """Publish one input or several, made by the codec. A new message is shown at once.

        It does not call an agent: hand `ClientRun.to_invocation()` to one.

        Args:
            inputs: One or a list: at most one new message, any number about messages that there are (a tool's result,
                an approval). The last is the one to be answered.
            run_id: Go on with this suspended run; None begins a new one.
            parent: The message before; by default the last one shown, and none with `fork_of`.
            fork_of: The input that is replaced.
            role: `assistant` for the result of a tool that begins a new run (see `create_tool_result_fork`).
            supersedes: The run that such a fork replaces.

        Returns:
            A handle of the run that will answer.

        Raises:
            MisuseError: No input, two new messages, or an input that the codec does not know. Nothing was published.
            SendError: Publishing failed after retries: nothing is shown any more, but if the acknowledgement only was
                lost the input is on the channel and will appear.
            InsufficientCapabilityError: This client may not publish.
            SessionClosedError, ChannelNotReadyError: The session is not connected, or the view is closed.

        Cancelled, the input may be on the channel or not; it is shown if it is.
        """
        self._check_open()
        if parent is None and fork_of is None and self.messages:
            parent = self.messages[-1].codec_message_id
        return await self._session.send_inputs(
            list(cast("Sequence[Any]", inputs)) if isinstance(inputs, (list, tuple)) else [inputs],
            {H.RUN_ID: run_id, H.PARENT: parent, H.FORK_OF: fork_of, H.ROLE: role, H.SUPERSEDES: supersedes},
            self,
        )

    async def edit(self, codec_message_id: str, inputs: Any) -> ClientRun[M, P]:
        """Replace an input by another one, which begins a branch; this view shows it.

        Raises:
            MisuseError: It is no input of this conversation. Else as `send`.
        """
        self._check_open()
        node = self._tree.node_of(codec_message_id)
        if not isinstance(node, InputNode):
            raise MisuseError(f"{codec_message_id[:80]!r} is no input of this conversation: only inputs are edited.")
        return await self.send(inputs, fork_of=codec_message_id, parent=node.parent)

    async def regenerate(self, codec_message_id: str) -> ClientRun[M, P]:
        """Ask for an answer anew; this view shows the new one as soon as it begins.

        Raises:
            MisuseError: It is no answer of this conversation, or there is nothing that it answers. Else as `send`.
        """
        self._check_open()
        node = self._tree.node_of(codec_message_id)
        if not isinstance(node, RunNode):
            raise MisuseError(f"{codec_message_id[:80]!r} is no answer of this conversation: it cannot be made anew.")
        ids = [one.codec_message_id for one in node.messages]
        place = ids.index(codec_message_id) if codec_message_id in ids else 0
        parent = ids[place - 1] if place else node.parent
        if parent is None:
            raise MisuseError("There is no message before this answer: it cannot be made anew.")
        # The first message of an answer that was made anew itself is one more alternative of the first answer.
        target = node.regenerates if place == 0 and node.regenerates is not None else codec_message_id
        self._selection.follow_regeneration(target)
        self._reselect()
        event = self._session.codec.create_regenerate(target, parent)
        return await self._session.send_inputs(
            [event], {"parent": parent, "msg-regenerate": target, "role": "user"}, self
        )

    def close(self) -> None:
        """Stop following the conversation, and end the iterators of changes. May be called again."""
        self._closed = True
        self._stop()
        for reader in tuple(self._readers):
            reader.end()

    # -- inside

    def show_edit(self, codec_message_id: str) -> Callable[[], None]:
        """This view's own edit is the branch that it shows. Called by the session; call what it returns to undo it."""
        before = self._selection.saved()
        node = self._tree.node_of(codec_message_id)
        if node is not None:
            self._selection.select(self._tree.siblings(node), node)
            self._reselect()

        def undo() -> None:
            self._selection.restore(before)
            self._reselect()

        return undo

    def _check_open(self) -> None:
        if self._closed:
            raise SessionClosedError("The view was closed: make a new one.")

    def _reselect(self) -> None:
        self._window.recompute()
        self._note(None, structure=True)

    def _on_change(self, change: TreeChange) -> None:
        if isinstance(change, BulkChange):
            self._window.on_bulk(change)
            if not change.begins:
                self._note(None, structure=True, gap=change.gap)
        elif not self._tree.live:
            return  # within a page of history: everything is looked at behind it
        elif isinstance(change, OutputChange):
            if self._window.on_content(change.node):
                self._note(change.node.key)
        elif isinstance(change, StructureChange):
            self._window.on_structure(change)
            self._note(None, structure=True)
        elif self._window.shows(change.run):
            self._note(change.run.key)

    def _note(self, key: str | None, *, structure: bool = False, gap: bool = False) -> None:
        for reader in self._readers:
            reader.note(key, structure=structure, gap=gap)
