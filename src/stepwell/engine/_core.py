"""What the turns of one engine share."""

from __future__ import annotations

import logging
import traceback

from anyio import CancelScope

from stepwell._clock import Clock
from stepwell.errors import CallerError, UnknownSessionError
from stepwell.loop import Alarm
from stepwell.models import ModelGateway, ModelSelection
from stepwell.models.providers import Providers
from stepwell.sessions import SessionStore

from ._hold import Hold
from ._lines import Lines
from ._owner import owner_id
from ._warm import WarmSessions

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
    ) -> None:
        self.store = store
        self.clock = clock
        self.providers = providers
        self.owner = owner_id()
        self.lease_ttl = lease_ttl
        self.capture_content = capture_content
        self.lines = Lines(clock)
        self.alarm = Alarm(clock)
        # The class behind `CancelScope()`, which costs more to find than an instance to make, and every turn makes one.
        self.scope = type(CancelScope())
        self.warm = WarmSessions(warm_sessions, clock)
        self.gateways: dict[ModelSelection, ModelGateway] = {}

    def hold(self) -> Hold:
        """A lease that is still to be taken."""
        return Hold(self.store, self.clock, self.owner, self.lease_ttl, self.report)

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
