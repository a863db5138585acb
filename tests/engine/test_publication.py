"""A turn on its channel: what the messages are, what clients see while it runs, between attempts, and afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, ClassVar

import anyio
import pytest

from engine_flows import BookFlow, TalkFlow
from loop_flows import FAST, Hooks, chat
from publication_kit import BACKENDS, Client, House, ended, house_on, said, shown, step_ended, until
from stepwell import Step, ToolContext, direct, go, retry_with_model, tool
from stepwell.engine._owner import owner_id
from stepwell.errors import FencedError, StaleWriterError
from stepwell.loop import CallPolicy, EmptyPolicy
from stepwell.messages import AssistantMessage
from stepwell.models import Candidate
from stepwell.testing import Call, Reply, ScriptedModel
from stepwell.wire import SUCCESSOR, Delivery, Name, WireMessage, codec_headers, transport_headers
from transport_kit import trace

pytestmark = pytest.mark.anyio

ONE = CallPolicy(attempts=1)
TWO = CallPolicy(attempts=2, retry_delay=0)


@pytest.fixture(params=BACKENDS)
async def house(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncGenerator[House]:
    async with house_on(request.param, request, tmp_path) as found:
        yield found


@pytest.fixture
def memory() -> House:
    return House.in_memory()


def whole(text: str) -> list[list[Any]]:
    """What is shown of a turn that answers "go" with a text."""
    return [["user", "go"], ["assistant", "|", text]]


def rejects_wrong(candidate: Candidate) -> bool:
    return "WRONG" in candidate.text


async def is_settled(house: House, clients: dict[str, Client], expected: list[list[Any]]) -> None:
    """All clients see this, also one that comes now, and one that reads a session's log."""
    for who, client in clients.items():
        await until(client, lambda client: shown(client) == expected)
        assert [step.status for run in client.view.runs for step in run.steps], who
    assert await house.shown() == expected


# -- the wire


async def test_a_turn_has_the_messages_and_headers_of_the_reference(memory: House) -> None:
    model = ScriptedModel([Reply.text(["Hi", " ", "friend"])])
    async with memory.engine(TalkFlow, model) as engine:
        result = await memory.say(engine, "Hello there")
    ours = [(one.name, transport_headers(one.extras), codec_headers(one.extras)) for one in await memory.log()]
    ours = [one for one in ours if "ephemeral" not in one[1] and not one[2].get("kind", "").startswith("data-")]
    golden: list[Any] = []
    for operation in trace("basic-run")["published"]:
        for message in operation.get("messages", ()):
            ai = message["extras"]["ai"]
            golden.append((message["name"], ai["transport"], ai.get("codec", {})))
    assert [name for name, _, _ in ours] == [name for name, _, _ in golden]
    for (name, mine, codec), (_, theirs, reference) in zip(ours, golden, strict=True):
        # Nobody said it on the channel, so there is no client who did.
        assert set(mine) == set(theirs) - {"input-client-id"}, name
        assert set(codec) == set(reference), name
        for key in ("role", "stream", "discrete", "step-reason", "run-reason"):
            assert mine.get(key) == theirs.get(key), (name, key)
    run, invocation = result.run_id, result.invocation_id
    start = next(one.serial for one in await memory.log() if one.name == Name.STEP_START)
    for name, headers, codec in ours:
        if name != Name.INPUT:
            assert (headers["run-id"], headers["invocation-id"]) == (run, invocation)
        if name in (Name.OUTPUT, Name.STEP_END):
            assert (headers["step-id"], headers["step-start-serial"]) == (f"{invocation}-step-0", start)
        if name == Name.OUTPUT:
            assert headers["codec-message-id"] == invocation
            assert codec.get("messageId", invocation) == invocation
    said_by_the_person = ours[0][1]["codec-message-id"]
    assert ours[1][1]["parent"] == ours[1][1]["input-codec-message-id"] == said_by_the_person


async def test_every_unit_is_a_step_and_the_turn_one_message_that_ends_once(memory: House) -> None:
    script = [
        Reply.tool_call("note", {"text": "x"}, id="a", text="Let me "),
        Reply.tool_call("save_name", {"name": "Ada"}, id="b"),
        "Is Ada right?",
    ]
    async with memory.engine(BookFlow, ScriptedModel(script)) as engine:
        result = await memory.say(engine, "Ada")
    step = ["step-start", "step-end complete"]
    assert await memory.names() == ["input", "run-start", *step * 5, "run-end complete"]
    assert await memory.shown() == [
        ["user", "Ada"],
        [
            "assistant",
            *("|", "Let me ", ("note", "output-available", {"output": "noted x"})),
            *("|", "|", ("save_name", "output-available", {"output": "ok"})),
            *("|", "|", "Is Ada right?"),
        ],
    ]
    log = await memory.log()
    steps = {transport_headers(one.extras).get("step-id"): None for one in log if one.name != Name.INPUT}
    assert [name for name in steps if name] == [f"{result.invocation_id}-step-{n}" for n in range(5)]
    kinds = [codec_headers(one.extras).get("kind") for one in log]
    assert (kinds.count("start"), kinds.count("finish-step"), kinds.count("finish")) == (1, 5, 1)
    assert kinds[-3:] == ["finish", None, None]  # in the last unit, in front of the ends of step and run


async def test_calls_whose_ids_repeat_within_a_turn_are_shown_apart(memory: House) -> None:
    script = [Reply.tool_call("note", {"text": "x"}), Reply.tool_call("note", {"text": "y"}), "Noted."]
    async with memory.engine(BookFlow, ScriptedModel(script)) as engine:
        await memory.say(engine, "Ada")
    outputs: list[Any] = [one[2]["output"] for one in (await memory.shown())[1] if isinstance(one, tuple)]
    assert outputs == ["noted x", "noted y"]


async def test_turns_follow_each_other_and_so_do_their_messages(memory: House) -> None:
    async with memory.engine(TalkFlow, ScriptedModel(["One.", "Two."])) as engine, AsyncExitStack() as stack:
        await memory.say(engine, "a")
        client = await stack.enter_async_context(memory.client())
        second = await memory.say(engine, "b")
        await until(client, ended(second.run_id))
        expected = [["user", "a"], ["assistant", "|", "One."], ["user", "b"], ["assistant", "|", "Two."]]
        assert shown(client) == await memory.shown() == expected
    inputs = [transport_headers(one.extras) for one in await memory.log() if one.name == Name.INPUT]
    starts = [transport_headers(one.extras) for one in await memory.log() if one.name == Name.RUN_START]
    assert "parent" not in inputs[0]
    # The second follows what the first came to.
    first = transport_headers(next(one.extras for one in await memory.log() if one.name == Name.OUTPUT))
    assert inputs[1]["parent"] == first["codec-message-id"]
    assert starts[1]["parent"] == inputs[1]["codec-message-id"]


# -- attempts


async def test_scenario_C01_clients_end_with_the_accepted_attempt(house: House) -> None:  # noqa: N802
    seen, gate = anyio.Event(), anyio.Event()
    script = [Reply.text(["Hel", "lo"]).gated(seen, after=2).failing(), Reply.text("Hi").gated(gate)]
    async with house.engine(chat(policy=FAST), ScriptedModel(["Ready.", *script])) as engine, AsyncExitStack() as stack:
        await house.say(engine, "first")
        before = await house.shown()
        clients = {"connected": await stack.enter_async_context(house.client())}
        turn = asyncio.create_task(house.say(engine, "go"))
        await until(clients["connected"], said("Hello"))
        seen.set()
        await until(clients["connected"], step_ended("failed"))
        clients["between"] = between = await stack.enter_async_context(house.client())
        await until(between, said("Hello"))  # a retry in progress never blanks what it will replace
        gate.set()
        await turn
        await is_settled(house, clients, [*before, *whole("Hi")])
    texts = [one.data for one in await house.log() if codec_headers(one.extras).get("kind") == "text"]
    assert texts == ["Ready.", "Hello", "Hi"]
    assert (await house.names())[-6:] == [
        "run-start", "step-start", "step-end failed", "step-start", "step-end complete", "run-end complete",
    ]  # fmt: skip


async def test_scenario_C02_reasoning_is_taken_back_too(house: House) -> None:  # noqa: N802
    seen = anyio.Event()
    broken = Reply.reasoning(["Let me ", "think"]).gated(seen, after=2).failing()
    script = [broken, Reply.reasoning(["Again."], ["Hi"])]
    async with house.engine(chat(policy=FAST), ScriptedModel(["Ready.", *script])) as engine:
        await house.say(engine, "first")
        async with house.client() as client:
            turn = asyncio.create_task(house.say(engine, "go"))
            await until(client, lambda client: shown(client)[-1] == ["assistant", "|", ("thought", "Let me think")])
            seen.set()
            await turn
            expected = [["user", "go"], ["assistant", "|", ("thought", "Again."), "Hi"]]
            await until(client, lambda client: shown(client)[2:] == expected)
            assert (await house.shown())[2:] == expected
    log = [one.data for one in await house.log() if codec_headers(one.extras).get("kind") == "reasoning"]
    assert log == ["Let me think", "Again."]


async def test_tool_input_of_a_dead_attempt_is_taken_back_and_never_closed(memory: House) -> None:
    call = Call("look", {"city": "Rome"}, id="dead")
    seen = anyio.Event()
    script = ["Ready.", Reply.tool_calls(call, text="I look.").gated(seen, after=5).failing(), "Nothing to look up."]
    async with memory.engine(chat(policy=FAST), ScriptedModel(script)) as engine:
        await memory.say(engine, "first")
        async with memory.client() as client:
            turn = asyncio.create_task(memory.say(engine, "go"))
            await until(client, lambda client: ("look", "input-streaming", {}) in shown(client)[-1])
            seen.set()
            await turn
    assert (await memory.shown())[2:] == whole("Nothing to look up.")
    dead = [one for one in await memory.log() if codec_headers(one.extras).get("toolCallId") == "dead"]
    assert len(dead) == 1
    assert transport_headers(dead[0].extras)["status"] != "complete"


@pytest.mark.parametrize("second", ["starts", "says nothing"])
@pytest.mark.parametrize("handled", [True, False])
async def test_scenario_C05_a_retry_that_fails_for_good(  # noqa: N802
    house: House, second: str, handled: bool
) -> None:
    hooks = Hooks(on_llm_error="Please call us." if handled else None)
    last = Reply.text("Your book").failing(after=1) if second == "starts" else Reply.error()
    seen = anyio.Event()
    script = ["Ready.", Reply.text("Your booking is").gated(seen, after=3).failing(), last]
    async with house.engine(chat(hooks, policy=TWO), ScriptedModel(script)) as engine:
        await house.say(engine, "first")
        async with house.client() as client:
            turn = asyncio.create_task(house.say(engine, "go"))
            await until(client, said("Your booking is"))
            seen.set()
            result = await turn
            assert result.success is handled
            await until(client, ended(result.run_id, "complete" if handled else "error"))
            expected = [["user", "go"], ["assistant", "|", "Please call us."]] if handled else [["user", "go"]]
            assert [one for one in shown(client)[2:] if one != ["assistant"]] == expected
            assert shown(client) == await house.shown()
            if not handled:
                run = client.view.run(result.run_id)
                assert run is not None
                assert run.error is not None
                assert run.error.message


async def test_scenario_C06_nothing_of_a_zombie_is_seen(house: House) -> None:  # noqa: N802
    gate, flow = anyio.Event(), chat(policy=FAST)
    zombie = Reply.text(["one ", "two ", "three ", "four ", "five"]).gated(gate, after=2)
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(house.engine(flow, ScriptedModel(["Ready.", zombie])))
        await house.say(first, "first")
        client = await stack.enter_async_context(house.client())
        turn = await stack.enter_async_context(first.stream("Chat", "go", session_id=house.session))
        await until(client, said("one two "))
        # It is taken for dead: its lease goes to somebody else, and from there to the second engine.
        thief = await house.store.acquire(house.session, "thief:boot:1:1", ttl=60, supersede=owner_id())
        await house.store.release(thief.lease)
        second = await stack.enter_async_context(house.engine(flow, ScriptedModel(["All of it."])))
        result = await second.recover(house.session)
        assert result.message == "All of it."
        await until(client, said("All of it."))
        before = await house.log()
        gate.set()
        await turn.done.wait()
        assert turn.result.error is not None
        # Whichever comes first: a word refused by the channel, or the commit by the store.
        assert turn.result.error.code == "stale_writer" or turn.result.error.ids["kind"] == "lost"
        assert await house.log() == before
        assert shown(client)[2:] == whole("All of it.")
        assert await house.shown() == shown(client)
        assert result.run_id == turn.result.run_id
        history = [row.message for row in await house.store.load_messages(house.session, "Talk")]
        assert [one.text for one in history if isinstance(one, AssistantMessage)] == ["Ready.", "All of it."]
    with pytest.raises(FencedError):
        await (await house.channel()).publish([WireMessage(name="late")], epoch=2)
    with pytest.raises(StaleWriterError):
        await house.store.renew(thief.lease, ttl=1)


async def test_scenario_C07_the_alternate_supersedes(house: House) -> None:  # noqa: N802
    hooks = Hooks(on_llm_error=retry_with_model("anthropic:spare"))
    seen = anyio.Event()
    broken = Reply.text("one two").gated(seen, after=2).failing()
    script = {"m": ["Ready.", broken, "Next turn."], "spare": ["The alternate answers."]}
    async with house.engine(chat(hooks, policy=ONE), ScriptedModel(script)) as engine:
        await house.say(engine, "first")
        async with house.client() as client:
            turn = asyncio.create_task(house.say(engine, "go"))
            await until(client, said("one two"))
            seen.set()
            result = await turn
            assert set(result.usage) == {"scripted:m", "anthropic:spare"}
            await until(client, ended(result.run_id))
            assert shown(client)[2:] == (await house.shown())[2:] == whole("The alternate answers.")
        await house.say(engine, "more")
    assert (await house.shown())[5] == ["assistant", "|", "Next turn."]
    authors = [m.message.model for m in await house.store.load_messages(house.session, "Talk")
               if isinstance(m.message, AssistantMessage)]  # fmt: skip
    assert authors == ["scripted:m", "anthropic:spare", "scripted:m"]


@pytest.mark.parametrize("mode", ["live", "held"])
async def test_scenario_C20_a_reply_that_is_rejected_after_its_tokens(house: House, mode: str) -> None:  # noqa: N802
    hooks = Hooks(check_response=rejects_wrong)
    flow = chat(hooks, policy=FAST, step={"stream_mode": mode})
    seen = anyio.Event()
    script = ["Ready.", Reply.text("WRONG answer").gated(seen, after=2), "right answer"]
    async with house.engine(flow, ScriptedModel(script)) as engine:
        await house.say(engine, "first")
        async with house.client() as client:
            turn = asyncio.create_task(house.say(engine, "go"))
            if mode == "live":
                await until(client, said("WRONG answer"))
            seen.set()
            result = await turn
            await until(client, ended(result.run_id))
            assert shown(client)[2:] == whole("right answer")
            assert (await house.shown())[2:] == whole("right answer")
    left = "WRONG" in "".join(str(one.data) for one in await house.log())
    assert left is (mode == "live")


async def test_scenario_C21_what_a_held_stage_may_not_say_never_leaves(house: House) -> None:  # noqa: N802
    hooks = Hooks(check_response=True, on_llm_error="I may not say that.")
    flow = chat(hooks, policy=TWO, step={"stream_mode": "held"})
    async with house.engine(flow, ScriptedModel(["The code is 4711", "The code is 4711"])) as engine:
        await house.say(engine, "go")
    assert await house.shown() == whole("I may not say that.")
    assert "4711" not in "".join(f"{one.data}{one.extras}" for one in await house.log())


async def test_a_held_reply_is_shown_whole_with_its_tools(memory: House) -> None:
    flow = chat(policy=FAST, step={"stream_mode": "held"})
    script = [Reply.tool_call("look", {"city": "Rome"}, text="I look."), "Rome is free."]
    async with memory.engine(flow, ScriptedModel(script)) as engine:
        await memory.say(engine, "go")
    call = ("look", "output-available", {"output": "Rome is free"})
    assert await memory.shown() == [["user", "go"], ["assistant", "|", "I look.", call, "|", "|", "Rome is free."]]


async def test_off_shows_the_final_message_alone(memory: House) -> None:
    flow = chat(policy=FAST, step={"stream_mode": "off"})
    script = [Reply.tool_call("look", {"city": "Rome"}, text="I look."), "Rome is free."]
    async with memory.engine(flow, ScriptedModel(script)) as engine:
        await memory.say(engine, "go")
    assert await memory.shown() == whole("Rome is free.")
    assert await memory.names() == ["input", "run-start", "step-start", "step-end complete", "run-end complete"]


# -- what code says


class Desk(Step):
    """A stage that does with a reply what the reply says."""

    counted: ClassVar[anyio.Event]

    def get_prompt(self) -> str:
        return "Desk."

    async def on_response(self, result: Any) -> Any:
        match result:
            case "rewrite":
                return "What code says."
            case "go":
                return go("Other")
            case "go with a message":
                return go("Other").with_message("We go on.")
            case "direct":
                return direct("A table.")
            case _:
                return None

    @tool
    async def table(self) -> Any:
        """Show a table."""
        return direct("A table.")

    @tool
    async def count(self, ctx: ToolContext) -> str:
        """Count, and tell how far it is."""
        ctx.progress({"done": 1})
        ctx.progress({"done": 2})
        await self.counted.wait()
        return "counted"

    @tool
    async def leave(self) -> Any:
        """Go on without a word."""
        return go("Other")

    @tool
    async def fail(self) -> str:
        """Fail."""
        raise RuntimeError("a secret of the customer")


async def told(house: House, script: list[Any], **options: Any) -> list[list[Any]]:
    """What a client shows that was there all the time, and one that comes later."""
    flow = chat(policy=FAST, base=Desk, step=options)
    async with house.engine(flow, ScriptedModel(["Ready.", *script])) as engine:
        await house.say(engine, "first")
        async with house.client() as client:
            result = await house.say(engine, "go")
            await until(client, ended(result.run_id, "complete" if result.success else "error"))
            late = await house.shown()
            assert shown(client) == late
    return late[3:]


@pytest.mark.parametrize("mode", ["live", "held", "off"])
@pytest.mark.parametrize(
    ("script", "expected"),
    [
        (["rewrite"], ["|", "What code says."]),
        (["direct"], ["|", "A table."]),
    ],
)
async def test_code_that_takes_the_place_of_a_reply(
    memory: House, mode: str, script: list[Any], expected: list[Any]
) -> None:
    assert await told(memory, script, stream_mode=mode) == [["assistant", *expected]]


@pytest.mark.parametrize(("mode", "first"), [("live", ["|", "go"]), ("held", ["|", "go"]), ("off", [])])
async def test_what_was_accepted_stays_shown_when_the_turn_goes_on(memory: House, mode: str, first: list[Any]) -> None:
    expected = ["assistant", *first, "|", "Elsewhere."]
    assert await told(memory, ["go", "Elsewhere."], stream_mode=mode) == [expected]


async def test_a_tool_shows_its_input_its_progress_and_its_result(memory: House) -> None:
    Desk.counted = anyio.Event()
    seen = anyio.Event()
    script = [Reply.tool_call("count", id="c"), Reply.text("Counted.").with_usage(7, 3).gated(seen, after=1)]
    progress: list[Any] = []
    kinds: list[str] = []
    async with memory.engine(chat(policy=FAST, base=Desk), ScriptedModel(["Ready.", *script])) as engine:
        await memory.say(engine, "first")
        async with memory.client() as client, (await memory.channel()).subscribe() as subscription:

            async def read(kind: str) -> None:
                while kind not in kinds:
                    for one in await subscription.read(1):
                        assert isinstance(one, Delivery)
                        kinds.append(codec_headers(one.extras).get("kind", ""))
                        if kinds[-1] == "data-stepwell-progress":
                            progress.append(one.data)

            turn = asyncio.create_task(memory.say(engine, "go"))
            await read("data-stepwell-progress")
            assert shown(client)[-1][2] == ("count", "input-available", {})
            Desk.counted.set()
            await until(client, lambda client: "Counted." in shown(client)[-1])
            seen.set()
            result = await turn
            await read("finish")
            await until(client, ended(result.run_id))
            assert shown(client)[3] == [
                "assistant", "|", ("count", "output-available", {"output": "counted"}), "|", "|", "Counted.",
            ]  # fmt: skip
    expected = {"call": "c", "tool": "count"}
    assert progress == [{**expected, "value": {"done": 1}}, {**expected, "value": {"done": 2}}]
    # Beside the message, and gone with the moment: for who looks on, not for who comes later.
    assert {"data-stepwell-stage", "data-stepwell-usage"} <= set(kinds)
    assert not any("stepwell" in codec_headers(one.extras).get("kind", "") for one in await memory.log())


async def test_input_of_a_call_is_available_only_when_the_reply_is_accepted(memory: House) -> None:
    gate = anyio.Event()
    reply = Reply.tool_call("look", {"city": "Rome"}, id="c", text="I look.").gated(gate, after=6)
    async with memory.engine(chat(policy=FAST), ScriptedModel(["Ready.", reply, "Free."])) as engine:
        await memory.say(engine, "first")
        async with memory.client() as client:
            turn = asyncio.create_task(memory.say(engine, "go"))
            await until(client, lambda client: ("look", "input-streaming", {}) in shown(client)[-1])
            await memory.clock.settle()  # type: ignore[union-attr]
            assert shown(client)[-1][-1] == ("look", "input-streaming", {})
            gate.set()
            result = await turn
            await until(client, ended(result.run_id))
            assert shown(client)[-1][3] == ("look", "output-available", {"output": "Rome is free"})


@pytest.mark.parametrize("mode", ["live", "held", "off"])
async def test_a_turn_that_shows_nothing_is_a_run_all_the_same(memory: House, mode: str) -> None:
    policy = CallPolicy(empty=EmptyPolicy(accept=True))
    flow = chat(policy=policy, step={"stream_mode": mode})
    async with memory.engine(flow, ScriptedModel([Reply.empty(), "Two."])) as engine:
        result = await memory.say(engine, "go")
        assert (result.success, result.message) == (True, "")
        assert await memory.shown() == [["user", "go"]]
        assert await memory.names() == ["input", "run-start", "run-end complete"]
        await memory.say(engine, "more")
    assert await memory.shown() == [["user", "go"], ["user", "more"], ["assistant", "|", "Two."]]


async def test_a_turn_that_fails_ends_in_error_without_a_word_of_the_cause(memory: House) -> None:
    script = [Reply.tool_call("fail", id="c", text="I try."), "Next."]
    async with memory.engine(chat(policy=FAST, base=Desk), ScriptedModel(script)) as engine:
        result = await memory.say(engine, "go")
        assert not result.success
        call = ("fail", "output-error", {"errorText": "The call failed."})
        [person, [who, *parts]] = await memory.shown()
        assert (person, who, parts[:2], parts[2][:2]) == (["user", "go"], "assistant", ["|", "I try."], call[:2])
        assert "secret" not in "".join(f"{one.data}{one.extras}" for one in await memory.log())
        assert (await memory.names())[-1] == "run-end error"
        async with memory.client() as client:
            assert ended(result.run_id, "error")(client)
        await memory.say(engine, "more")
    assert (await memory.shown())[2:] == [["user", "more"], ["assistant", "|", "Next."]]


async def test_what_a_cancelled_turn_said_stays_and_its_run_says_so(house: House) -> None:
    stalls = Reply.text(["one ", "two "]).gated(anyio.Event(), after=2)
    async with house.engine(TalkFlow, ScriptedModel(["Ready.", stalls, "Next."])) as engine:
        await house.say(engine, "first")
        async with house.client() as client:
            turn = asyncio.create_task(house.say(engine, "go"))
            await until(client, said("one two "))
            assert await engine.cancel(house.session, reason="enough")
            result = await turn
            assert result.error is not None
            assert result.error.ids["kind"] == "user"
            await until(client, ended(result.run_id, "cancelled"))
            assert shown(client)[2:] == whole("one two ")
            assert step_ended("cancelled")(client)
        await house.say(engine, "more")
        assert (await house.shown())[3:] == [
            ["assistant", "|", "one two "],
            ["user", "more"],
            ["assistant", "|", "Next."],
        ]
    history = [row.message for row in await house.store.load_messages(house.session, "TalkStep")]
    assert [one.text for one in history if isinstance(one, AssistantMessage)] == ["Ready.", "Next."]


async def test_the_channel_of_an_ended_session_points_to_its_successor(memory: House) -> None:
    script = [Reply.tool_call("save_name", {"name": "Ada"}), "Right?", Reply.tool_call("done"), "Bye.", "Name?", "Hm?"]
    async with memory.engine(BookFlow, ScriptedModel(script)) as engine:
        first = await memory.say(engine, "Ada")
        assert (await memory.say(engine, "yes")).completed
        before = await memory.shown()
        fresh = await memory.say(engine, "hello again")
        memory.session = first.session_id
        again = await memory.say(engine, "still me")
        assert again.session_id == fresh.session_id != first.session_id
    old = await memory.log(first.session_id)
    pointers = [one.data for one in old if one.name == SUCCESSOR]
    assert pointers == [{"session": fresh.session_id, "channel": (await memory.channel()).name}]
    memory.session = first.session_id
    assert await memory.shown() == before  # clients of the protocol pass it over
    memory.session = fresh.session_id
    assert [one[1] for one in await memory.shown() if one[0] == "user"] == ["hello again", "still me"]
