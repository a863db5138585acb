"""Which of siblings a view shows, and which messages follow from it."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Generic, NamedTuple, TypeVar

from ._codec import CodecMessage
from ._nodes import InputNode, Node, RunNode
from ._tree import ConversationTree

__all__ = ["BranchPoint", "Selection"]

M = TypeVar("M")
P = TypeVar("P")


class BranchPoint(NamedTuple, Generic[M, P]):
    """A message that has alternatives.

    Attributes:
        anchor: None where whole nodes are alternatives. Else the message inside of a run that other runs make anew.
        nodes: The alternatives, oldest first: for an anchor the run that holds it, then the runs that make it anew.
        messages: What stands for each.
    """

    anchor: str | None
    nodes: Sequence[Node[M, P]]
    messages: Sequence[CodecMessage[M]]


class Selection(Generic[M, P]):
    """The choices of one view. Where nothing is chosen the newest is shown."""

    def __init__(self, tree: ConversationTree[M, P]) -> None:
        self._tree = tree
        # By the key of one member of a group; which one does not matter, all are asked. A group's members change.
        self._chosen: dict[str, str] = {}
        self._anchored: dict[str, str] = {}  # message inside a run -> the run that is shown from there on

    # -- groups of nodes

    def choose(self, group: Sequence[Node[M, P]]) -> Node[M, P]:
        """The member that is shown."""
        key = self._choice(group)
        return next((node for node in group if node.key == key), group[-1])

    def select(self, group: Sequence[Node[M, P]], node: Node[M, P]) -> None:
        """Show this member from now on."""
        self.forget(group)
        self._chosen[node.key] = node.key

    def forget(self, group: Sequence[Node[M, P]]) -> None:
        """Show the newest again."""
        for node in group:
            self._chosen.pop(node.key, None)

    def pin(self, node: Node[M, P], shown: Set[Node[M, P]]) -> None:
        """Somebody has replaced an input: a view goes on showing what it shows, unless it has chosen before."""
        if not isinstance(node, InputNode):
            return
        group = self._tree.siblings(node)
        if len(group) > 1 and self._choice(group) is None:
            for member in group:
                if member in shown:
                    self._chosen[member.key] = member.key
                    return

    def saved(self) -> dict[str, str]:
        """The choices among nodes, for `restore`."""
        return dict(self._chosen)

    def restore(self, saved: dict[str, str]) -> None:
        """Take choices back that came to nothing."""
        self._chosen = saved

    def rename(self, old: str, new: str) -> None:
        """A node has got another key."""
        for choices in (self._chosen, self._anchored):
            for key, chosen in list(choices.items()):
                if old in (key, chosen):
                    del choices[key]
                    choices[new if key == old else key] = new if chosen == old else chosen

    def _choice(self, group: Sequence[Node[M, P]]) -> str | None:
        return next((self._chosen[node.key] for node in group if node.key in self._chosen), None)

    # -- messages inside of runs

    def regenerators(self, node: Node[M, P]) -> frozenset[RunNode[M, P]]:
        """The runs that make a message anew that is not the first of `node`: they are shown in its place."""
        if not isinstance(node, RunNode):
            return frozenset()
        messages = node.messages
        if len(messages) < 2 or not any(self._tree.has_replies(one.codec_message_id) for one in messages):
            return frozenset()
        return frozenset(run for place in range(1, len(messages)) for run in self._regenerators(messages, place))

    def emit(self, node: Node[M, P], out: list[CodecMessage[M]], used: set[Node[M, P]]) -> None:
        """Add a node's messages to `out`, and every node they come from to `used`.

        Where the message of a place is made anew by a run that is selected, that run stands in for it and for what
        comes behind it in its own run.
        """
        used.add(node)
        messages = node.messages
        if not isinstance(node, RunNode) or len(messages) < 2:
            out.extend(messages)
            return
        for place, message in enumerate(messages):
            if place:
                runs = self._regenerators(messages, place)
                chosen = self._standing_in(message.codec_message_id, node, runs)
                if chosen is not node and chosen not in used:
                    self.emit(chosen, out, used)
                    return
            out.append(message)

    def _regenerators(self, messages: Sequence[CodecMessage[M]], place: int) -> list[RunNode[M, P]]:
        target, before = messages[place].codec_message_id, messages[place - 1].codec_message_id
        return [run for run in self._tree.replies(before) if run.regenerates == target]

    def _standing_in(self, anchor: str, owner: RunNode[M, P], runs: Sequence[RunNode[M, P]]) -> RunNode[M, P]:
        if not runs:
            return owner
        key = self._anchored.get(anchor)
        return next((run for run in (owner, *runs) if run.key == key), runs[-1])

    # -- branch points

    def point(self, codec_message_id: str) -> BranchPoint[M, P] | None:
        """The branch point that a message stands for; None if it has no alternatives."""
        node = self._tree.node_of(codec_message_id)
        if node is None:
            return None
        if isinstance(node, RunNode):
            inner = self._inner_point(node, codec_message_id)
            if inner is not None:
                return inner
            if not node.messages or node.messages[0].codec_message_id != codec_message_id:
                return None
        group = [one for one in self._tree.siblings(node) if one.messages]
        if len(group) < 2:
            return None
        return BranchPoint(None, group, [one.messages[0] for one in group])

    def _inner_point(self, node: RunNode[M, P], codec_message_id: str) -> BranchPoint[M, P] | None:
        owner, anchor = node, codec_message_id
        place = _place_of(owner, anchor)
        if place == 0 and node.regenerates is not None:
            found = self._tree.node_of(node.regenerates)
            if isinstance(found, RunNode):
                owner, anchor = found, node.regenerates
                place = _place_of(owner, anchor)
        if place is None or place == 0:
            return None
        runs = [run for run in self._regenerators(owner.messages, place) if run.messages]
        if not runs:
            return None
        return BranchPoint(anchor, [owner, *runs], [owner.messages[place], *(run.messages[0] for run in runs)])

    def index(self, point: BranchPoint[M, P]) -> int:
        """Which alternative is shown."""
        if point.anchor is None:
            chosen = self.choose(point.nodes)
        else:
            owner, *runs = [node for node in point.nodes if isinstance(node, RunNode)]
            chosen = self._standing_in(point.anchor, owner, runs)
        return point.nodes.index(chosen)

    def select_at(self, point: BranchPoint[M, P], index: int) -> None:
        """Show this alternative from now on."""
        if point.anchor is None:
            self.select(self._tree.siblings(point.nodes[index]), point.nodes[index])
        else:
            self._anchored[point.anchor] = point.nodes[index].key

    def follow_regeneration(self, target: str) -> None:
        """This client has asked for `target` anew: show the newest, now and when it comes."""
        self._anchored.pop(target, None)
        node = self._tree.node_of(target)
        if isinstance(node, RunNode) and _place_of(node, target) == 0:
            self.forget(self._tree.siblings(node))


def _place_of(node: Node[M, P], codec_message_id: str) -> int | None:
    for place, message in enumerate(node.messages):
        if message.codec_message_id == codec_message_id:
            return place
    return None
