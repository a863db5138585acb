"""A client's handle of the run that answers its input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import msgspec

from stepwell.wire import ErrorInfo

from ._codec import CodecMessage
from ._invocation import Invocation
from ._latch import Latch
from ._nodes import InputNode

if TYPE_CHECKING:
    from ._client import ClientSession

__all__ = ["ClientRun", "Steer", "SteerOutcome"]

M = TypeVar("M")
P = TypeVar("P")


class SteerOutcome(msgspec.Struct, frozen=True):
    """What became of a steering input.

    Attributes:
        consumed: Whether an output said that it answers it.
        run_terminal_reason: How the run ended; None if it was suspended.
    """

    consumed: bool
    run_terminal_reason: str | None


class Steer:
    """A steering input on its way. Both may be awaited by anybody, or by nobody.

    Attributes:
        published: Its serial, when the channel has it. Raises `MisuseError` if the run has ended, and as `View.send`.
        outcome: What became of it, when the run is suspended with it answered, or ends. Raises as `published`, and
            `SessionClosedError` if the session is left before.
    """

    def __init__(self) -> None:
        self.published: Latch[str] = Latch()
        self.outcome: Latch[SteerOutcome] = Latch()

    def fail(self, error: Exception) -> None:
        """It will not come to anything."""
        self.published.fail(error)
        self.outcome.fail(error)


class ClientRun(Generic[M, P]):
    """The run that answers an input of this client: what is known of it now. Made by `View.send`.

    Attributes:
        started: Resolves when an agent has started or resumed the run. Raises `SessionClosedError` if the session is
            left before, `SubscriptionError` if reading failed. It has no limit of its own.
        input_codec_message_id: The `codec-message-id` of the input.
        input_event_id: Its `event-id`.
    """

    def __init__(
        self, session: ClientSession[M, P], input_codec_message_id: str, input_event_id: str, continued: str | None
    ) -> None:
        self.started: Latch[None] = Latch()
        self.input_codec_message_id = input_codec_message_id
        self.input_event_id = input_event_id
        self._session = session
        self._continued = continued
        self._run_id = ""

    @property
    def run_id(self) -> str:
        """The run's id; empty until `started`."""
        return self._run_id

    @property
    def status(self) -> str:
        """See `RunInfo.status`; `active` until anything else is known."""
        run = self._session.tree.run_node(self._run_id)
        return run.status if run is not None else "active"

    @property
    def error(self) -> ErrorInfo | None:
        """Why it ended, with status `error`."""
        run = self._session.tree.run_node(self._run_id)
        return run.error if run is not None else None

    @property
    def messages(self) -> Sequence[CodecMessage[M]]:
        """The input that the run answers, and what the run has said over all its invocations."""
        tree = self._session.tree
        run = tree.run_node(self._run_id)
        anchor = run.parent if run is not None and run.parent is not None else self.input_codec_message_id
        asked = tree.node_of(anchor)
        found = list(asked.messages) if isinstance(asked, InputNode) else []
        return found + list(run.messages) if run is not None else found

    async def cancel(self) -> None:
        """Ask the agent to stop: also before it has begun. The run ends only when the agent says so.

        Raises:
            SendError, SessionClosedError, ChannelNotReadyError: As `View.send`.
        """
        await self._session.publish_cancel(self._continued, self.input_codec_message_id)

    def steer(self, event: Any) -> Steer:
        """Say something into the run as it goes on. Waits for the run to start, in the background.

        Args:
            event: An input of the codec, as for `View.send`.

        Raises:
            SessionClosedError, ChannelNotReadyError: The session is not connected.
        """
        return self._session.steer(self, event)

    def to_invocation(self) -> Invocation:
        """What an agent needs to know to answer."""
        return Invocation(input_event_id=self.input_event_id, session_name=self._session.channel.name)

    def begin(self, run_id: str) -> None:
        """An agent has taken it up. Called by the session."""
        self._run_id = run_id
        self.started.resolve(None)
