"""What an agent answers: the branch of the conversation that leads to its run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from ._codec import CodecMessage
from ._history import HistoryWalk
from ._nodes import InputNode, Node, RunNode
from ._tree import ConversationTree
from ._trigger import Trigger, is_first_part

__all__ = ["PromptView"]

M = TypeVar("M")


class PromptView(Generic[M]):
    """The messages before a run, oldest first, and the run's own. Empty until the run's trigger is known.

    A turn before that did not complete is left out together with what it answered: half a turn is nothing that a model
    should see. A regeneration ends in front of the message to be made anew. Steering inputs that no output has answered
    yet come last.

    What it holds is what was read: `load` reads the rest.
    """

    def __init__(
        self,
        tree: ConversationTree[M, Any],
        history: Callable[[], HistoryWalk],
        trigger: Callable[[], Trigger | None],
        run_id: Callable[[], str],
        unanswered: Callable[[], Sequence[str]],
    ) -> None:
        self._tree = tree
        self._history = history
        self._trigger = trigger
        self._run_id = run_id
        self._unanswered = unanswered

    @property
    def messages(self) -> list[M]:
        """The application's messages."""
        return [one.message for one in self.codec_messages]

    @property
    def codec_messages(self) -> list[CodecMessage[M]]:
        """The messages with their ids."""
        trigger = self._trigger()
        if trigger is None:
            return []
        waiting = set(self._unanswered())
        found: list[CodecMessage[M]] = []
        for node in self._without_broken_turns(self._branch(trigger), trigger):
            for message in node.messages:
                if message.codec_message_id == trigger.regenerates:
                    return found
                found.append(message)
        return [one for one in found if one.codec_message_id not in waiting] + [
            one for one in found if one.codec_message_id in waiting
        ]

    @property
    def complete(self) -> bool:
        """Whether the branch was read back to its first message."""
        trigger = self._trigger()
        if trigger is None:
            return False
        branch = self._branch(trigger)
        if not branch or branch[0].parent is not None:
            return not branch and trigger.anchor is None
        first = branch[0]
        return first.started if isinstance(first, RunNode) else is_first_part(first.serial)

    async def load(self) -> bool:
        """Read history until the branch is complete, or there is no more.

        Returns:
            `complete`.

        Raises:
            HistoryFetchError: A page could not be read; may be called again.
            SessionClosedError, ChannelNotReadyError: The session is not connected.
        """
        return await self._history().load_until(lambda: self.complete)

    def _branch(self, trigger: Trigger) -> list[Node[M, Any]]:
        branch: list[Node[M, Any]] = []
        node = self._tree.node_of(trigger.anchor) if trigger.anchor is not None else None
        while node is not None and node not in branch:
            branch.append(node)
            node = self._tree.node_of(node.parent) if node.parent is not None else None
        branch.reverse()
        own = self._tree.run_node(self._run_id())
        if own is not None and own not in branch:
            branch.append(own)
        return branch

    def _without_broken_turns(self, branch: list[Node[M, Any]], trigger: Trigger) -> list[Node[M, Any]]:
        # A tool's result is a run's node under its own id until its run-start has come back.
        own = {self._tree.run_node(self._run_id()), self._tree.node_of(trigger.anchor) if trigger.anchor else None}
        broken = {
            node for node in branch if isinstance(node, RunNode) and node not in own and node.status != "complete"
        }
        answered = {node.parent for node in broken}
        return [
            node
            for node in branch
            if node not in broken and not (isinstance(node, InputNode) and node.codec_message_id in answered)
        ]
