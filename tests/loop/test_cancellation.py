"""Row 1 everywhere: before, between and after hooks, during delays, and between acceptance and what follows."""

from __future__ import annotations

from typing import Any

import anyio
import anyio.lowlevel
import pytest

from loop_flows import RawGateway, chat, replies, verdicts
from stepwell import retry_with_model
from stepwell.engine import HookCalled, Turn
from stepwell.errors import TurnCancelledError
from stepwell.loop import CallPolicy
from stepwell.models import Finish, StopReason, TextDelta
from stepwell.testing import FakeClock, Reply, ScriptedModel, TurnHarness

pytestmark = pytest.mark.anyio

FAIL = Reply.text("half").failing(status=503)


class Cancelling:
    """A harness whose hooks may cancel the turn; `asked` are the hooks, in order."""

    def __init__(self, at: str, *, wait: bool = False, answers: dict[str, Any] | None = None) -> None:
        self.at = at
        self.wait = wait
        self.answers = answers or {}
        self.asked: list[str] = []
        self.h: TurnHarness

    @property
    def turn(self) -> Turn:
        assert self.h.turn is not None
        return self.h.turn

    def hook(self, name: str) -> Any:
        def sync(owner: Any, context: Any) -> Any:
            self.asked.append(name)
            if name == self.at:
                assert not context.cancelled.is_set()
                self.turn.cancel()
                assert context.cancelled.is_set()
            return self.answers.get(name)

        return sync

    def ahook(self, name: str) -> Any:
        sync = self.hook(name)

        async def hook(owner: Any, context: Any) -> Any:
            value = sync(owner, context)
            if self.wait:
                await anyio.lowlevel.checkpoint()
            return value

        return hook

    async def say(self, *script: Any, policy: CallPolicy | None = None) -> TurnHarness:
        stage = {
            "on_llm_error": self.ahook("stage error"),
            "on_llm_blocked": self.ahook("stage blocked"),
            "should_retry_llm_error": self.hook("stage retry"),
        }
        flow = {
            "on_llm_error": self.ahook("flow error"),
            "on_llm_blocked": self.ahook("flow blocked"),
            "should_retry_llm_error": self.hook("flow retry"),
        }
        made = chat(policy=policy or CallPolicy(attempts=2), step=stage, flow=flow)
        async with TurnHarness(made, model=ScriptedModel(script)) as self.h:
            result = await self.h.say("hi")
            assert replies(await self.h.history("Talk")) == []
        assert isinstance(self.turn.error, TurnCancelledError)
        assert result.error is not None
        assert result.error.ids["kind"] == "user"
        assert result.message == ""
        return self.h


async def test_between_the_stages_retry_hook_and_the_flows() -> None:
    case = Cancelling("stage retry")
    h = await case.say(FAIL)
    assert case.asked == ["stage retry"]
    assert h.clock.slept in ([], [0.5])


@pytest.mark.parametrize("answer", [True, False, None])
async def test_after_the_retry_hook(answer: bool | None) -> None:
    case = Cancelling("flow retry", answers={"flow retry": answer})
    await case.say(FAIL)
    assert case.asked == ["stage retry", "flow retry"]


@pytest.mark.parametrize("wait", [False, True])
@pytest.mark.parametrize(("name", "reply"), [("error", FAIL), ("blocked", Reply.blocked("safety", text="half"))])
async def test_between_the_stages_hook_and_the_flows(name: str, reply: Reply, wait: bool) -> None:
    case = Cancelling(f"stage {name}", wait=wait)
    await case.say(reply, policy=CallPolicy(attempts=1))
    assert case.asked == [f"stage {name}"]


@pytest.mark.parametrize("who", ["stage", "flow"])
@pytest.mark.parametrize(("name", "reply"), [("error", FAIL), ("blocked", Reply.blocked("safety", text="half"))])
async def test_after_a_hook_its_answer_does_not_count(who: str, name: str, reply: Reply) -> None:
    case = Cancelling(f"{who} {name}", answers={f"{who} {name}": "the hook's reply"})
    h = await case.say(reply, policy=CallPolicy(attempts=1))
    assert case.asked[-1] == f"{who} {name}"
    assert "the hook's reply" not in h.shown
    assert h.of(HookCalled) == []


async def test_after_a_hook_no_alternate_is_called() -> None:
    case = Cancelling("stage error", answers={"stage error": retry_with_model("scripted:spare")})
    h = await case.say(FAIL, policy=CallPolicy(attempts=1))
    assert len(h.model.requests) == 1


@pytest.mark.parametrize("at_the_end", ["fails", "blocks", "is empty"])
async def test_before_a_hook(at_the_end: str) -> None:
    """Cancelled while the stream ends, in a gateway that does not notice."""
    case = Cancelling("nowhere")

    async def play(request: Any) -> Any:
        case.turn.cancel()
        if at_the_end == "fails":
            raise ConnectionError
        stop = StopReason.BLOCKED if at_the_end == "blocks" else StopReason.COMPLETE
        yield Finish(stop=stop)

    stage = {"on_llm_error": case.ahook("error"), "on_llm_blocked": case.ahook("blocked")}
    stage["should_retry_llm_error"] = case.hook("retry")
    async with TurnHarness(chat(step=stage), model=RawGateway(play)) as h:
        case.h = h
        await h.say("hi")
    assert isinstance(h.turn.error, TurnCancelledError)
    assert case.asked == []


@pytest.mark.parametrize("mode", ["live", "held", "off"])
async def test_between_acceptance_and_what_follows(mode: str) -> None:
    """Cancelled in the last moment of a stream: the reply does not count, and a held one is not shown."""
    heard: list[Any] = []

    async def on_response(self: Any, result: Any) -> None:
        heard.append(result)

    async def play(request: Any) -> Any:
        yield TextDelta("Hello")
        h.turn.cancel()
        yield Finish(stop=StopReason.COMPLETE)

    flow = chat(step={"on_response": on_response, "stream_mode": mode})
    async with TurnHarness(flow, model=RawGateway(play)) as h:
        await h.say("hi")
        assert replies(await h.history("Talk")) == []
    assert isinstance(h.turn.error, TurnCancelledError)
    assert heard == []
    if mode != "live":
        assert h.shown == ""


async def test_during_the_delay_between_attempts() -> None:
    clock = FakeClock()
    model = ScriptedModel([Reply.error(status=503)])
    async with (
        TurnHarness(chat(policy=CallPolicy()), model=model, clock=clock) as h,
        anyio.create_task_group() as group,
    ):
        group.start_soon(h.say, "hi")
        await clock.settle()
        assert clock.slept == [0.5]
        h.turn.cancel()
    assert h.results[0].error is not None
    assert h.results[0].error.code == "turn_cancelled"
    assert len(model.requests) == 1
    assert clock.monotonic() == 0


async def test_before_the_first_token() -> None:
    model = ScriptedModel([Reply.text("Hello").stalling(after=0)])
    async with TurnHarness(chat(), model=model) as h, anyio.create_task_group() as group:

        async def cancel() -> None:
            await model.wait_stalled()
            h.turn.cancel("user", "changed my mind")

        group.start_soon(cancel)
        result = await h.say("hi")
    assert verdicts(h) == ["cancelled"]
    assert model.cancelled == 1
    assert (h.turn.error.kind, h.turn.error.reason) == ("user", "changed my mind")
    assert not result.success


async def test_a_gateway_that_hides_the_cancellation_changes_nothing() -> None:
    """It turns the cancellation into an ordinary error, as some client libraries do."""
    hidden = anyio.Event()

    async def play(request: Any) -> Any:
        yield TextDelta("Hello")
        try:
            hidden.set()
            await anyio.sleep_forever()
        except BaseException as error:
            raise ConnectionError from error

    case = Cancelling("nowhere")
    stage = {"on_llm_error": case.ahook("error"), "should_retry_llm_error": case.hook("retry")}
    async with TurnHarness(chat(step=stage), model=RawGateway(play)) as h, anyio.create_task_group() as group:

        async def cancel() -> None:
            await hidden.wait()
            h.turn.cancel()

        group.start_soon(cancel)
        await h.say("hi")
    assert isinstance(h.turn.error, TurnCancelledError)
    assert case.asked == []
