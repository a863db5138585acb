"""What the turns of one engine share."""

from __future__ import annotations

import logging
import math
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from anyio import CancelScope

from stepwell._clock import Clock
from stepwell.errors import CallerError, UnknownSessionError
from stepwell.loop import Alarm
from stepwell.messages import JsonObject
from stepwell.models import ModelGateway, ModelSelection
from stepwell.models.providers import Providers
from stepwell.sessions import SessionStore, TurnRecord
from stepwell.wire import SUCCESSOR, ChannelProvider, WireMessage, session_channel

from ._hold import Hold
from ._lines import Lines
from ._owner import owner_id
from ._warm import WarmSessions

if TYPE_CHECKING:
    from stepwell.transport import ChannelWriter, Codec

    from ._inputs import TurnInput
    from ._publication import Publication
    from ._turn import TurnTask

__all__ = ["Core"]

_logger = logging.getLogger("stepwell.engine")


class Core:
    """Store, clock, models, queues and warm sessions of an engine; turns work with this and know no engine."""

    def __init__(
        self,
        store: SessionStore,
        clock: Clock,
        providers: Providers,
        *,
        lease_ttl: float,
        warm_sessions: int,
        capture_content: bool,
        channels: ChannelProvider | None = None,
        channel_prefix: str = "",
        roll_up: float = 0.02,
    ) -> None:
        self.store = store
        self.clock = clock
        self.providers = providers
        self.owner = owner_id()
        self.lease_ttl = lease_ttl
        self.capture_content = capture_content
        self.lines = Lines(clock)
        self.alarm = Alarm(clock)
        self.scope: type[CancelScope] = CancelScope
        self.warm = WarmSessions(warm_sessions, clock)
        self.channels = channels
        self.channel_prefix = channel_prefix
        self.roll_up = roll_up
        self._codec: Codec[Any, Any] | None = None
        self.gateways: dict[ModelSelection, ModelGateway] = {}
        self.running: dict[str, TurnTask] = {}  # by session: the turn of this process that has its lease
        self.launch: Callable[[TurnInput], TurnTask]  # starts a turn of its own

    def in_loop(self) -> None:
        """There is an event loop from now on."""
        # The class behind `CancelScope()`, which costs more to find than an instance to make, and every turn makes one.
        self.scope = type(CancelScope())

    def hold(self) -> Hold:
        """A lease that is still to be taken."""
        return Hold(self.store, self.clock, self.owner, self.lease_ttl, self.report)

    def channel_of(self, session_id: str) -> str:
        """The name of a session's channel."""
        return session_channel(session_id, self.channel_prefix)

    async def writer(self, session_id: str, epoch: int, on_fenced: Callable[[], object]) -> ChannelWriter | None:
        """The session's channel, for the holder of its lease; `None` in an engine without channels."""
        if self.channels is None:
            return None
        from stepwell.transport import ChannelWriter

        channel = await self.channels.open(self.channel_of(session_id))
        # It tries for as long as the lease is held: an unreachable channel never changes what a turn comes to.
        return ChannelWriter(
            channel, epoch=epoch, client_id=None, clock=self.clock, on_fenced=on_fenced, patience=math.inf
        )

    async def point(self, writer: ChannelWriter | None, ended: str, successor: str) -> None:
        """Say on the channel of an ended session which one its conversation goes on in. May be repeated."""
        if writer is not None:
            data: JsonObject = {"session": successor, "channel": self.channel_of(successor)}
            await writer.publish([WireMessage(name=SUCCESSOR, data=data, idempotency_id=f"{ended}:{successor}")])

    def codec(self) -> Codec[Any, Any]:
        """Of what is said on channels."""
        if self._codec is None:
            from stepwell.transport.codecs import UIMessageCodec

            self._codec = UIMessageCodec(clock=self.clock)
        return self._codec

    def publication(self, writer: ChannelWriter, hold: Hold, turn: TurnRecord, *, taken_over: bool) -> Publication:
        """A run on a channel."""
        from ._publication import Publication

        return Publication(
            writer,
            self.codec(),
            self.clock,
            turn,
            check=hold.check,
            taken_over=taken_over,
            roll_up=self.roll_up,
            report=lambda what, error: self.report(what, error, hold.session),
        )

    async def exists(self, session_id: str) -> bool:
        """Whether a session is stored."""
        try:
            await self.store.load(session_id)
        except UnknownSessionError:
            return False
        return True

    def report(self, what: str, error: BaseException, session: str) -> None:
        """Log a failure: ids, code, and where code that is not ours raised.

        What an exception says may hold a customer's text: it is logged only with `capture_content`.
        """
        level = logging.INFO if isinstance(error, CallerError) else logging.WARNING
        code = getattr(error, "code", type(error).__name__)
        cause = error.__cause__ if hasattr(error, "code") else error
        if cause is None or hasattr(cause, "code"):
            _logger.log(level, "%s: %s (session %s)", what, code, session or "-")
        elif self.capture_content:
            _logger.log(level, "%s: %s (session %s)", what, code, session or "-", exc_info=cause)
        else:
            where = "".join(traceback.format_tb(cause.__traceback__))
            _logger.log(level, "%s: %s (session %s)\n%s%s", what, code, session or "-", where, type(cause).__name__)
