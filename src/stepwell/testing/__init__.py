"""Testing kit: what Stepwell's own tests use, for the tests of flows, gateways, stores and channels.

`ScriptedModel` is a model gateway that says what the test wrote down; `FakeClock` a clock that only the test moves::

    from stepwell.testing import FakeClock, Reply, ScriptedModel

    clock = FakeClock(auto_advance=True)
    with ScriptedModel([Reply.error(status=529), "Two rooms are free."], clock=clock) as model:
        ...  # run a turn
    assert clock.slept == [0.5]
"""

from ._channel_conformance import ChannelConformance
from ._clock import FakeClock
from ._faults import CrashedError, Faults, sever
from ._harness import TurnHarness
from ._scripted import Call, Reply, Scripted, ScriptedModel, ScriptError
from ._store_conformance import SessionStoreConformance
from ._store_processes import SessionStoreProcessConformance

__all__ = [
    "Call",
    "ChannelConformance",
    "CrashedError",
    "FakeClock",
    "Faults",
    "Reply",
    "ScriptError",
    "Scripted",
    "ScriptedModel",
    "SessionStoreConformance",
    "SessionStoreProcessConformance",
    "TurnHarness",
    "sever",
]
