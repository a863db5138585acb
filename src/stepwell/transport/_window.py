"""The part of a conversation that a view shows: one branch, from some message on, as a list that is kept up to date.

What comes live is shown. What history brings in front of it is withheld until somebody asks for older messages. So the
window begins at an edge, a place in the order of nodes, and ends with the branch; in the first node it may hide
messages. A change of content costs what changed; only a change of structure goes through the conversation.
"""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Sequence, Set
from typing import Any, Final, Generic, TypeVar

from ._changes import BulkChange, StructureChange
from ._codec import CodecMessage
from ._nodes import Node, RunNode
from ._selection import Selection
from ._tree import ConversationTree

__all__ = ["Window"]

_BEFORE_ALL: Final = (False, "", 0)
_BEHIND_ALL: Final = (True, "", sys.maxsize)
"""Places in the order of nodes."""

M = TypeVar("M")
P = TypeVar("P")


def _order_of(node: Node[Any, Any]) -> tuple[bool, str, int]:
    assert node.place is not None
    return node.place[1]


def _edge_at(node: Node[Any, Any]) -> tuple[bool, str, int]:
    """The edge of a window that begins with a node.

    Without the node's number, where its serial is enough: a tree that is built anew after a gap gives other numbers.
    """
    local, serial, number = _order_of(node)
    return local, serial, number if local else 0


class _Segment(Generic[M, P]):
    """What one node of the branch contributes to the list, with what stands in for parts of it."""

    __slots__ = ("length", "node", "start", "used")

    def __init__(self, node: Node[M, P], start: int) -> None:
        self.node = node
        self.start = start
        self.length = 0
        self.used: set[Node[M, P]] = set()


class Window(Generic[M, P]):
    """See the module."""

    def __init__(self, tree: ConversationTree[M, P], selection: Selection[M, P]) -> None:
        self._tree = tree
        self._selection = selection
        self._branch: list[Node[M, P]] = []
        self._places: list[tuple[bool, str, int]] = []
        self._set_branch()
        self._shown: dict[Node[M, P], None] = dict.fromkeys(self._branch)
        self._edge = _BEFORE_ALL
        self._hidden = 0  # messages at the head of the list that are not shown: the edge is one of nodes
        self._list: list[CodecMessage[M]] = []
        self._segments: dict[Node[M, P], _Segment[M, P]] = {}  # by every node that a segment's messages come from
        self._regenerators: dict[Node[M, P], frozenset[Node[M, P]]] = {}  # of every node shown
        self._stale = True
        self._changed: set[Node[M, P]] = set()
        self._messages: Sequence[CodecMessage[M]] | None = None
        self._before: Sequence[CodecMessage[M]] = ()
        self.grown = 0
        """Messages that history has added to shown nodes, since it was set to 0."""

    @property
    def messages(self) -> Sequence[CodecMessage[M]]:
        """The list: a new one after each change."""
        self._refresh()
        if self._messages is None:
            self._messages = self._list[self._hidden :]
        return self._messages

    @property
    def shown(self) -> Set[Node[M, P]]:
        """The nodes of the branch that are shown, in order."""
        return self._shown.keys()

    @property
    def available(self) -> int:
        """Messages of the branch that are loaded and older than what is shown."""
        return self._hidden + sum(len(node.messages) for node in self._held())

    def shows(self, node: Node[M, P]) -> bool:
        """Whether a node's content is part of the list, or would be if it had any."""
        return node in self._shown

    # -- changes

    def on_content(self, node: Node[M, P]) -> bool:
        """A node's content changed. Whether that can be seen."""
        if self._stale:
            return True  # not known yet; the list is made anew anyway
        # What stands in for a part of another run need not be on the branch itself.
        if node not in self._shown and node not in self._segments:
            return False
        self._messages = None
        self._changed.add(node)
        return True

    def on_structure(self, change: StructureChange) -> None:
        """The tree changed its shape."""
        if change.renamed is not None and change.node is not None:
            self._selection.rename(change.renamed, change.node.key)
        node = change.node
        if node is not None:
            self._selection.pin(node, self.shown)
            if node.place is not None and node.place[1] < self._edge:
                held = {one.key for one in self._held()}
                if node in self._shown or (node.key not in held and change.renamed not in held):
                    self._edge = _edge_at(node)  # it came live, or its echo did and gave it its place in the order
            if self._extend(node):
                return
        self.recompute()

    def _extend(self, node: Node[M, P]) -> bool:
        """Take a node in that goes on from the branch: what happens in every turn costs nothing of what was before.

        False if it does not, or may stand in for a part of another run.
        """
        if node in self._on_branch or not self._tree.extends(node, self._on_branch):
            return False
        if self._edge > _order_of(node) or (isinstance(node, RunNode) and node.regenerates is not None):
            return False
        self._branch.append(node)
        self._places.append(_order_of(node))
        self._on_branch.add(node)
        self._shown[node] = None
        self._messages = None
        if not self._stale:
            self._regenerators[node] = self._selection.regenerators(node)
            self._add_segment(node)
        return True

    def on_bulk(self, change: BulkChange) -> None:
        """A page of history, or a snapshot after a gap."""
        if change.begins:
            self._before = self.messages
        elif change.gap:
            self._on_gap()
        else:
            self._on_history()

    def recompute(self) -> None:
        """Go through the branch anew: the tree or the selection changed."""
        first = next(iter(self._shown), None)
        self._set_branch()
        self._shown = dict.fromkeys(self._branch[self._first() :])
        if next(iter(self._shown), None) is not first:
            self._hidden = 0  # it was of another node's messages
        self._stale = True
        self._messages = None

    def _set_branch(self) -> None:
        self._branch = self._tree.visible(self._selection.choose)
        # Where the nodes stood then: one of them may have moved, or be gone, when the next change is told.
        self._places = [_order_of(node) for node in self._branch]
        self._on_branch = set(self._branch)

    def show_from(self, node: Node[M, P]) -> None:
        """Another branch was selected: `node` and what follows from it is shown, however old it is."""
        if node.place is not None:
            self._edge = min(self._edge, _edge_at(node))
        self.recompute()

    def _on_history(self) -> None:
        before = len(self._before)
        # What is shown before the first page came live, and is where the window begins.
        self._edge = next((_edge_at(node) for node in self._shown if node.place is not None), _BEHIND_ALL)
        self.recompute()
        self._keep_first()
        self.grown += len(self.messages) - before

    def _on_gap(self) -> None:
        """All nodes are new, and in the same places, unless the channel was deleted and is another one now."""
        shown = {node.key for node in self._shown}
        if not any(node.key in shown for node in self._tree.visible(self._selection.choose)):
            self._edge = _BEFORE_ALL
        self.recompute()
        self._keep_first()

    def _keep_first(self) -> None:
        """What has come in front of the message that was the first shown stays hidden."""
        before, self._before = self._before, ()
        first = before[0].codec_message_id if before else None
        self._refresh()
        self._hide(next((i for i, one in enumerate(self._list) if one.codec_message_id == first), 0))

    def _hide(self, count: int) -> None:
        self._hidden = count
        self._messages = None

    # -- more and less

    def reveal(self, count: int) -> int:
        """Show up to `count` older messages that are loaded. How many there were."""
        self._refresh()
        shown = len(self._list) - self._hidden
        while self._hidden < count and (held := self._held()):
            needed = count - self._hidden
            while held and needed > 0:
                node = held.pop()
                self._edge = _edge_at(node)
                needed -= len(node.messages)
            self.recompute()
            self._refresh()
            self._hidden = len(self._list) - shown
        revealed = min(count, self._hidden)
        self._hide(self._hidden - revealed)
        return revealed

    def _held(self) -> list[Node[M, P]]:
        """The nodes of the branch that are loaded and in front of the edge."""
        return self._branch[: self._first()]

    def _first(self) -> int:
        return bisect_left(self._places, self._edge)

    def hide(self, count: int) -> None:
        """Hide the oldest messages shown."""
        self._hide(self._hidden + count)

    # -- the list

    def _refresh(self) -> None:
        if not self._stale and self._changed:
            changed, self._changed = self._changed, set()
            if not all(self._patch(node) for node in changed):
                self._stale = True
        if self._stale:
            self._stale = False
            self._changed.clear()
            self._build()

    def _build(self) -> None:
        self._list, self._segments = [], {}
        self._regenerators = {node: self._selection.regenerators(node) for node in self._shown}
        standing_in = {run for runs in self._regenerators.values() for run in runs}
        for node in self._shown:
            if node in standing_in:
                continue  # shown in another run's place, if at all
            self._add_segment(node)

    def _add_segment(self, node: Node[M, P]) -> None:
        segment = _Segment(node, len(self._list))
        self._selection.emit(node, self._list, segment.used)
        segment.length = len(self._list) - segment.start
        for used in segment.used:
            self._segments[used] = segment

    def _patch(self, node: Node[M, P]) -> bool:
        """Replace what comes from a node. False if the whole list must be made anew."""
        if node in self._shown and self._selection.regenerators(node) != self._regenerators[node]:
            return False
        segment = self._segments.get(node)
        if segment is None:
            return True  # an alternative that is not selected
        messages: list[CodecMessage[M]] = []
        used: set[Node[M, P]] = set()
        self._selection.emit(segment.node, messages, used)
        end = segment.start + segment.length
        if used != segment.used or (len(messages) != segment.length and end != len(self._list)):
            return False
        self._list[segment.start : end] = messages
        segment.length = len(messages)
        return True
