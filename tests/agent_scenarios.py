"""The scenarios of the golden traces, played by the agent and the client of this package on one stage.

What they do is what the scenario of the same name in `tests/node/harness/scenarios.mjs` does.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import anyio

from agent_kit import CODEC, Faulty, Stage, Torn, agent_on, failing, held, reply, stuck, texts, until, user
from codec_kit import TinyCodec
from stepwell.errors import ContinuityLostError, MisuseError, StepwellError
from stepwell.testing import FakeClock
from stepwell.transport import AgentRun, ClientRun, ClientSession
from stepwell.transport.codecs import UIMessage, create_tool_result_fork
from stepwell.wire import ErrorInfo, WireMessage
from transport_kit import ALL_CHUNKS, trace

Scenario = Callable[[Stage], Awaitable[None]]
SCENARIOS: dict[str, Scenario] = {}
"""By the names of the traces."""


def scenario(play: Scenario) -> Scenario:
    SCENARIOS[play.__name__.replace("_", "-")] = play
    return play


def stage_of(name: str) -> Stage:
    """Where a scenario is played: in its own codec."""
    return Stage(TinyCodec) if name == "custom-codec" else Stage()


@scenario
async def basic_run(stage: Stage) -> None:
    async with await stage.client() as client, await stage.agent() as agent:
        asked = await client.view.send(user("Hello there"))
        run = agent.create_run(asked.to_invocation())
        await run.start()
        result = await run.pipe(reply(["Hi", " ", "friend"]))
        await run.end(result.reason)
        await until(lambda: asked.status == "complete")
        assert result.reason == "complete"
        assert result.error is None
        assert asked.run_id == run.run_id
        assert texts(client.view.messages) == ["user:Hello there", "assistant:Hi friend"]
        await agent.end()


@scenario
async def all_chunks(stage: Stage) -> None:
    async with await stage.client() as client, await stage.agent() as agent:
        parts: list[Any] = [
            {"type": "text", "text": "Look at this"},
            {"type": "file", "mediaType": "image/png", "url": "https://x.test/a.png"},
            {"type": "data-geo", "id": "g1", "data": {"lat": 1}},
        ]
        asked = await client.view.send(CODEC.create_user_message({"id": "u-1", "role": "user", "parts": parts}))
        run = agent.create_run(asked.to_invocation())
        await run.start()
        result = await run.pipe(ALL_CHUNKS)
        assert result.reason == "complete"
        await run.end(result.reason)
        bad = agent.create_run(asked.to_invocation())
        await bad.start()
        refused = await bad.pipe([{"type": "no-such-chunk"}])
        assert refused.reason == "error"
        assert isinstance(refused.error, MisuseError)
        await bad.end("error")


@scenario
async def step_retry_crash(stage: Stage) -> None:
    """Two processes under one step id; the first never closes its step, and goes on when the second has begun."""
    async with await stage.client() as client:
        asked = await client.view.send(user("Tell me a story"))
        ids = {"run_id": "run-stable", "invocation_id": "inv-1"}
        async with await stage.agent() as opener:
            await opener.create_run(asked.to_invocation(), **ids).start()
        adopt = {**ids, "trigger_event_id": asked.input_event_id}
        gate = anyio.Event()
        async with await stage.agent() as first, await stage.agent() as second, anyio.create_task_group() as tasks:
            dead = first.adopt_run(**adopt)
            await dead.load()
            dying = dead.create_step("inv-1-7")
            await dying.start()
            zombie = [
                {"type": "text-delta", "id": "t1", "delta": " ZOMBIE"},
                {"type": "data-zombie", "data": {"n": 1}},
                {"type": "text-end", "id": "t1"},
            ]
            tasks.start_soon(dying.pipe, held(reply(["DEAD ", "attempt"])[:5], gate, zombie))
            await until(lambda: texts(client.view.messages)[-1] == "assistant:DEAD attempt")
            run = second.adopt_run(**adopt)
            await run.load()
            step = run.create_step("inv-1-7")
            await step.start()
            await until(lambda: not any("DEAD" in text for text in texts(client.view.messages)))
            result = await step.pipe(reply(["Good ", "attempt"], message_id="msg-2"))
            await step.end()
            gate.set()
            await until(lambda: not dying.piping)
            await dying.end()
            await run.end(result.reason)
        await until(lambda: asked.status == "complete")
        assert texts(client.view.messages) == ["user:Tell me a story", "assistant:Good attempt"]
        (info,) = client.tree.run("run-stable").steps  # type: ignore[union-attr]
        assert (info.attempt_count, info.status) == (2, "complete")


@scenario
async def step_retry_failed(stage: Stage) -> None:
    """In one process: a step that failed is tried again under its id, then comes a new one."""
    errors: list[Any] = []
    async with await stage.client() as client, await stage.agent() as agent:
        asked = await client.view.send(user("Retry me"))
        run = agent.create_run(asked.to_invocation(), run_id="run-f", invocation_id="inv-f", on_error=errors.append)
        await run.start()
        async with run.create_step() as a:
            failed = await a.pipe(failing(reply(["half ", "done"])[:5]))
        async with run.create_step() as b:
            assert (await b.pipe(reply(["all ", "good"], message_id="msg-2"))).reason == "complete"
        async with run.create_step() as c:
            await c.send({"type": "data-note", "data": {"n": 1}})
        await run.end("complete")
        await until(lambda: asked.status == "complete")
        assert failed.reason == "error"
        assert str(failed.error) == "model exploded"
        assert [error.wire_code for error in errors] == [104008]
        assert errors[0].__cause__ is failed.error
        assert (a.step_id, b.step_id, c.step_id) == ("inv-f-step-0", "inv-f-step-0", "inv-f-step-1")
        assert texts(client.view.messages)[1] == "assistant:all good"
        assert [step.attempt_count for step in client.tree.run("run-f").steps] == [2, 1]  # type: ignore[union-attr]


@scenario
async def cancel_midstream(stage: Stage) -> None:
    seen: list[Any] = []

    async def on_cancelled(write: Any) -> None:
        await write({"type": "text-delta", "id": "t1", "delta": " [stopped]"})

    async def on_cancel(request: Any) -> bool:
        seen.append(request.client_id)
        return True

    async with await stage.client() as client, await stage.agent() as agent:
        asked = await client.view.send(user("Long answer"))
        run = agent.create_run(asked.to_invocation(), on_cancel=on_cancel, on_cancelled=on_cancelled)
        await run.start()
        results: list[Any] = []
        async with anyio.create_task_group() as tasks:

            async def work() -> None:
                results.append(await run.pipe(stuck(reply(["one ", "two "])[:5])))

            tasks.start_soon(work)
            await until(lambda: texts(client.view.messages)[-1] == "assistant:one two ")
            await asked.cancel()
        assert results[0].reason == "cancelled"
        assert run.cancelled.is_set()
        assert run.cancel_reason == "request"
        assert run.status == "active", "a cancel ends nothing by itself"
        await run.end(results[0].reason)
        await until(lambda: asked.status == "cancelled")
        assert seen == ["user-a"]
        assert texts(client.view.messages)[1] == "assistant:one two  [stopped]"
        assert [step.status for step in client.tree.run(run.run_id).steps] == ["cancelled"]  # type: ignore[union-attr]


@scenario
async def cancel_routing(stage: Stage) -> None:
    """A cancel before the run was created; one that is refused; one whose handler raises; one for nobody."""
    errors: list[Any] = []
    async with await stage.client() as client, await stage.agent() as agent:
        asked = await client.view.send(user("Early cancel"))
        await asked.cancel()
        run = agent.create_run(asked.to_invocation())
        await run.start()
        assert run.cancelled.is_set()
        result = await run.pipe(reply(["never"]))
        assert result.reason == "cancelled"
        await run.end(result.reason)

        second = await client.view.send(user("Second"))
        refused: list[Any] = []

        async def refuse(request: Any) -> bool:
            refused.append(request.run_id)
            return False

        run2 = agent.create_run(second.to_invocation(), on_cancel=refuse)
        await run2.start()
        await second.started
        await client.cancel(second.run_id)
        await until(lambda: refused == [run2.run_id])
        assert not run2.cancelled.is_set()
        result = await run2.pipe(reply(["still here"], message_id="m2"))
        await run2.end(result.reason)
        await until(lambda: second.status == "complete")

        third = await client.view.send(user("Third"))

        def explode(request: Any) -> bool:
            raise ValueError("boom")

        run3 = agent.create_run(third.to_invocation(), on_cancel=explode, on_error=errors.append)
        await run3.start()
        await client.cancel(run3.run_id)
        await until(lambda: bool(errors))
        assert errors[0].wire_code == 104002
        assert not run3.cancelled.is_set()
        await run3.end("complete")
        await client.cancel("no-such-run")
        await agent.end()


@scenario
async def late_join(stage: Stage) -> None:
    gate = anyio.Event()
    async with await stage.client() as client, await stage.agent() as agent:
        asked = await client.view.send(user("Stream slowly"))
        run = agent.create_run(asked.to_invocation())
        await run.start()
        rest = [
            {"type": "text-delta", "id": "t1", "delta": "D"},
            {"type": "text-delta", "id": "t1", "delta": "E"},
            *reply([])[3:],
        ]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run.pipe, held(reply(["A", "B", "C"])[:6], gate, rest))
            await until(lambda: texts(client.view.messages)[-1] == "assistant:ABC")
            gate.set()
        await run.end("complete")
        await until(lambda: asked.status == "complete")
        async with await stage.client("user-post") as post:
            await post.view.load_older(50)
            assert post.view.messages == client.view.messages


@scenario
async def suspend_resume_approval(stage: Stage) -> None:
    async with await stage.client() as client, await stage.agent() as agent:
        asked = await client.view.send(user("Pay Bob"))
        run = agent.create_run(asked.to_invocation(), invocation_id="inv-1")
        await run.start()
        pay = {"toolCallId": "c1", "toolName": "pay"}
        await run.pipe(
            [
                {"type": "start", "messageId": "m1"},
                {"type": "start-step"},
                {"type": "tool-input-start", **pay},
                {"type": "tool-input-delta", "toolCallId": "c1", "inputTextDelta": '{"to":"Bob"}'},
                {"type": "tool-input-available", **pay, "input": {"to": "Bob"}},
                {"type": "tool-approval-request", "toolCallId": "c1", "approvalId": "ap1"},
                {"type": "finish-step"},
                {"type": "finish", "finishReason": "tool-calls"},
            ]
        )
        await run.suspend()
        await until(lambda: asked.status == "suspended")
        target = client.view.messages[-1].codec_message_id
        approval = CODEC.create_tool_approval_response(target, "c1", approved=True, reason="ok")
        answer = await client.view.send(approval, run_id=asked.run_id)
        run2 = agent.create_run(answer.to_invocation(), invocation_id="inv-2", run_id="ignored-by-continuation")
        await run2.start()
        assert run2.run_id == run.run_id
        assert run2.has_input()
        await run2.pipe(
            [
                {"type": "start", "messageId": "m1"},
                {"type": "tool-output-available", "toolCallId": "c1", "output": {"ok": True}},
                {"type": "start-step"},
                {"type": "text-start", "id": "t1"},
                {"type": "text-delta", "id": "t1", "delta": "Paid"},
                {"type": "text-end", "id": "t1"},
                {"type": "finish-step"},
                {"type": "finish", "finishReason": "stop"},
            ]
        )
        assert not run2.has_input(), "the answer that began the invocation is no steering input"
        await run2.end("complete")
        await until(lambda: asked.status == "complete")
        steps = client.tree.run(run.run_id).steps  # type: ignore[union-attr]
        assert [step.step_id for step in steps] == ["inv-1-step-0", "inv-2-step-0"]


@scenario
async def tool_result_fork(stage: Stage) -> None:
    async with await stage.client() as client, await stage.agent() as agent:
        asked = await client.view.send(user("Where am I"))
        run = agent.create_run(asked.to_invocation(), invocation_id="inv-1")
        await run.start()
        locate = {"toolCallId": "c1", "toolName": "locate"}
        await run.pipe(
            [
                {"type": "start", "messageId": "m1"},
                {"type": "start-step"},
                {"type": "tool-input-start", **locate},
                {"type": "tool-input-available", **locate, "input": {}},
                {"type": "finish-step"},
                {"type": "finish", "finishReason": "tool-calls"},
            ]
        )
        await run.suspend()
        await until(lambda: asked.status == "suspended")
        node = client.tree.run_node(asked.run_id)
        assert node is not None
        fork_id = "00000000-0000-4000-8000-00000000f0f0"
        fork = create_tool_result_fork(node.messages, "c1", fork_id=fork_id, output={"city": "Rome"})
        answer = await client.view.send(fork, role="assistant", parent=node.parent, supersedes=node.key)
        run2 = agent.create_run(answer.to_invocation(), invocation_id="inv-2")
        await run2.start()
        assert run2.run_id != run.run_id
        await run2.view.load()
        assert run2.view.messages[-1]["parts"][-1]["state"] == "output-available"
        result = await run2.pipe(reply(["You are in Rome"], message_id="m2"))
        await run2.end(result.reason)
        await until(lambda: answer.status == "complete")
        assert [info.run_id for info in client.view.runs] == [run2.run_id]


@scenario
async def regenerate_and_edit(stage: Stage) -> None:
    async with await stage.client() as client, await stage.agent() as agent:

        async def turn(asked: ClientRun[UIMessage, Any], text: str, message_id: str) -> list[str]:
            run = agent.create_run(asked.to_invocation())
            await run.start()
            assert await run.view.load()
            prompt = texts(run.view.messages)
            result = await run.pipe(reply([text], message_id=message_id))
            await run.end(result.reason)
            await until(lambda: asked.status == "complete")
            return prompt

        await turn(await client.view.send(user("Q1")), "A1", "m1")
        await turn(await client.view.send(user("Q2")), "A2", "m2")
        first, last = client.view.messages[0].codec_message_id, client.view.messages[3].codec_message_id
        prompt = await turn(await client.view.regenerate(last), "A2-bis", "m2b")
        assert prompt == ["user:Q1", "assistant:A1", "user:Q2"], "it stops in front of what is made anew"
        assert texts(client.view.messages) == ["user:Q1", "assistant:A1", "user:Q2", "assistant:A2-bis"]
        prompt = await turn(await client.view.edit(first, user("Q1-edited")), "A1-edited", "m1e")
        assert prompt == ["user:Q1-edited"]
        assert texts(client.view.messages) == ["user:Q1-edited", "assistant:A1-edited"]


@scenario
async def steering(stage: Stage) -> None:
    told: list[int] = []
    async with await stage.client() as client, await stage.agent() as agent:
        asked = await client.view.send(user("Plan a trip"))
        run = agent.create_run(asked.to_invocation(), on_steer=lambda: told.append(1))
        await run.start()
        await asked.started
        assert run.has_input()
        steer = asked.steer(user("Make it 5 days"))
        await steer.published
        await until(lambda: told == [1])
        await run.pipe(reply(["3 day plan"], message_id="m1"))
        assert run.has_input()
        assert texts(run.view.messages) == ["user:Plan a trip", "assistant:3 day plan", "user:Make it 5 days"]
        await run.pipe(reply(["5 day plan"], message_id="m2"))
        assert not run.has_input()
        await run.end("complete")
        outcome = await steer.outcome
        assert (outcome.consumed, outcome.run_terminal_reason) == (True, "complete")


@scenario
async def session_end_vs_detach(stage: Stage) -> None:
    async with await stage.client() as client:
        asked = await client.view.send(user("Left open"))
        async with await stage.agent() as agent:
            run = agent.create_run(asked.to_invocation(), run_id="run-x", invocation_id="inv-x")
            await run.start()
            step = run.create_step()
            await step.start()
            await step.send({"type": "data-x", "data": {"n": 1}})
            before = len(stage.record)
            await agent.detach()
            assert len(stage.record) == before
            assert run.cancelled.is_set()
            assert run.cancel_reason == "detached"
        await until(lambda: asked.run_id == "run-x")
        assert asked.status == "active"
        async with await stage.agent("agent-2") as other:
            adopted = other.adopt_run(run_id="run-x", invocation_id="inv-y", trigger_event_id=asked.input_event_id)
            await adopted.load()
            await adopted.create_step().start()
            await other.end()
            assert adopted.status == "cancelled"
        await until(lambda: asked.status == "cancelled")


@scenario
async def run_error(stage: Stage) -> None:
    async with await stage.client() as client, await stage.agent() as agent:
        asked = await client.view.send(user("Fail please"))
        run = agent.create_run(asked.to_invocation())
        await run.start()
        result = await run.pipe(failing(reply(["par", "tial"])[:5]))
        assert result.reason == "error"
        await run.end("error", ErrorInfo(104008, f"unable to complete run; {result.error}"))
        await until(lambda: asked.status == "error")
        bare = await client.view.send(user("Bare error"))
        run2 = agent.create_run(bare.to_invocation())
        await run2.start()
        await run2.end("error")
        await until(lambda: bare.status == "error")
        custom = await client.view.send(user("Custom error"))
        run3 = agent.create_run(custom.to_invocation())
        await run3.start()
        await run3.end("error", ErrorInfo(42910, "quota"))
        await until(lambda: custom.error == ErrorInfo(42910, "quota"))
        assert bare.error is not None
        assert bare.error.code == 104008


@scenario
async def foreign_messages(stage: Stage) -> None:
    errors: list[Any] = []
    async with await stage.client() as client, await stage.agent(on_error=errors.append) as agent:
        channel = await stage.channel("user-a")
        await channel.publish([WireMessage(name="app-event", data={"hello": 1})])
        (serial,) = await channel.publish([WireMessage(name="app-stream", data="a")])
        await channel.append(serial, "b", None, seq=1)
        await channel.publish([WireMessage(name="ai-output", data="no extras")])
        await channel.publish([WireMessage(name="ai-run-end")])
        step_end = {"ai": {"transport": {"run-id": "x", "step-id": "y"}}}
        await channel.publish([WireMessage(name="ai-step-end", extras=step_end)])
        await channel.publish([WireMessage(name="ai-cancel", extras={"ai": {"transport": {}}})])
        asked = await client.view.send(user("Hi"))
        run = agent.create_run(asked.to_invocation())
        await run.start()
        result = await run.pipe(reply(["ok"]))
        await run.end(result.reason)
        await until(lambda: asked.status == "complete")
        assert not run.cancelled.is_set()
        assert errors == []


@scenario
async def chat_transport(stage: Stage) -> None:
    """The agent's part of it; what `useChat` makes of it is the JavaScript side's."""
    async with await stage.client() as client, await stage.agent() as agent:
        said: Any = {"id": "u1", "role": "user", "parts": [{"type": "text", "text": "Hi"}]}
        asked = await client.view.send(CODEC.create_user_message(said))
        run = agent.create_run(asked.to_invocation())
        await run.start()
        result = await run.pipe(reply(["Hey ", "you"]))
        await run.end(result.reason)


@scenario
async def append_recovery(stage: Stage) -> None:
    """An append is refused once. It is repeated before anything else is said, so nobody ever misses its text."""
    appends: list[int] = []

    def second_append(number: int, what: str) -> str | None:
        appends.extend([number] if what == "append" else [])
        return "refused" if what == "append" and len(appends) == 2 else None

    async with await stage.client() as client:
        flaky = Faulty(await stage.channel("agent-1"), second_append)
        async with agent_on(flaky, FakeClock(auto_advance=True)) as agent:
            asked = await client.view.send(user("Flaky network"))
            run = agent.create_run(asked.to_invocation())
            await run.start()
            result = await run.pipe(reply(["one ", "two ", "three"]))
            await run.end(result.reason)
            await until(lambda: asked.status == "complete")
            assert result.reason == "complete"
            assert len(appends) == 5, "three pieces, one of them twice, and the close"
            assert texts(client.view.messages)[1] == "assistant:one two three"


@scenario
async def misuse(stage: Stage) -> None:
    """Everything that may be called at the wrong time, and the code of what it raises."""
    codes: dict[str, Any] = {}

    async def probe(label: str, call: Callable[[], Any]) -> None:
        try:
            given = call()
            if given is not None:
                await given
        except StepwellError as error:
            codes[label] = {
                "code": getattr(error, "wire_code", None),
                "statusCode": getattr(error, "status_code", None),
            }
        else:
            codes[label] = "no error"

    def begin(run: AgentRun[Any]) -> Callable[[], Any]:
        return lambda: run.create_step().start()

    client, agent = await stage.client(), await stage.agent()
    async with client, agent:
        asked = await client.view.send(user("Misuse"))
        invocation = asked.to_invocation()

        def adopt(run_id: str, invocation_id: str, of: ClientRun[Any, Any] = asked) -> AgentRun[Any]:
            return agent.adopt_run(run_id=run_id, invocation_id=invocation_id, trigger_event_id=of.input_event_id)

        run = agent.create_run(invocation, run_id="run-m", invocation_id="inv-m")
        await probe("run.pipe before start", lambda: run.pipe(reply(["x"])))
        await probe("run.end before start", lambda: run.end("complete"))
        await probe("run.suspend before start", run.suspend)
        await probe("step.start before run.start", begin(run))
        await run.start()
        await probe("second run.start", run.start)
        step = run.create_step()
        await probe("step.pipe before step.start", lambda: step.pipe(reply(["x"])))
        await probe("step.send before step.start", lambda: step.send({"type": "data-a", "data": {"n": 1}}))
        await probe("step.end before step.start", lambda: run.create_step("never-started").end())
        await step.start()
        await probe("second step.start", step.start)
        await probe("start of another step while one is active", begin(run))
        await probe("run.pipe while a step is active", lambda: run.pipe(reply(["x"])))
        await probe("run.suspend while a step is active", run.suspend)
        await step.end()
        await probe("second step.end", step.end)
        await probe("step.pipe after step.end", lambda: step.pipe(reply(["x"])))
        gate = anyio.Event()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run.pipe, held([], gate))
            await stage.clock.settle()
            await probe("step.start while a run.pipe is in flight", begin(run))
            await probe("concurrent run.pipe", lambda: run.pipe(reply(["x"])))
            await probe("run.suspend while a run.pipe is in flight", run.suspend)
            gate.set()
        await run.create_step().start()
        await run.end("complete")
        await probe("second run.end", lambda: run.end("complete"))
        await probe("run.suspend after end", run.suspend)
        await probe("run.pipe after end, before the run-end echo", lambda: run.pipe(reply(["x"])))
        await until(lambda: asked.status == "complete")
        await probe("run.pipe after end, after the run-end echo", lambda: run.pipe(reply(["x"])))
        await probe("step.start after end", begin(run))
        await probe("createRun with empty runId", lambda: agent.create_run(invocation, run_id=""))
        await probe("adoptRun with empty invocationId", lambda: adopt("a", ""))
        await probe("load of an ended run", adopt("run-m", "inv-2").load)
        await probe("load of an unknown run", adopt("nope", "inv-3").load)
        suspended = await client.view.send(user("Suspended"))
        run2 = agent.create_run(suspended.to_invocation(), run_id="run-s")
        await run2.start()
        await run2.suspend()
        await until(lambda: suspended.status == "suspended")
        await probe("load of a suspended run", adopt("run-s", "x", suspended).load)
        await probe("client send with no inputs", lambda: client.view.send([]))
        await probe("client send with two new messages", lambda: client.view.send([user("a"), user("b")]))
        await probe("regenerate unknown message", lambda: client.view.regenerate("nope"))
        await probe("edit unknown message", lambda: client.view.edit("nope", user("x")))
        await probe("loadOlder(0)", lambda: client.view.load_older(0))
        aborted = await client.view.send(user("Aborted first"))
        run3 = agent.create_run(aborted.to_invocation())
        run3.cancel()
        await probe("start after external abort", run3.start)
        unconnected = await stage.agent("agent-9")
        await probe("start without connect", unconnected.create_run(invocation).start)
        await agent.end()
        await probe("agent connect after end", agent.__aenter__)
    await probe("client connect after close", client.__aenter__)
    await probe("client send after close", lambda: client.view.send(user("x")))
    # The reference lets output through until it has read its own run-end. Nothing follows a run's end here.
    refused = {"code": 40003, "statusCode": 400}
    assert codes == {**trace("misuse")["errorCodes"], "run.pipe after end, before the run-end echo": refused}


@scenario
async def continuity_loss(stage: Stage) -> None:
    """Both sides lose their place in the log, are told so, and go on with a snapshot of it; so does the run."""
    errors: list[Any] = []
    mine, theirs = Torn(await stage.channel("user-a"), stage), Torn(await stage.channel("agent-1"), stage)
    async with (
        ClientSession(mine, CODEC, client_id="user-a", clock=stage.clock) as client,
        agent_on(theirs, stage.clock, on_error=errors.append) as agent,
    ):
        asked = await client.view.send(user("Lose it"))
        run = agent.create_run(asked.to_invocation())
        await run.start()
        await asked.started
        changes = client.view.changes()
        await mine.tear()
        await theirs.tear()
        await until(lambda: bool(errors))
        assert isinstance(errors[0], ContinuityLostError)
        while not (await anext(changes)).gap:
            pass
        assert not run.cancelled.is_set(), "docs/decisions/0009"
        await run.end("cancelled")
        await until(lambda: asked.status == "cancelled")


@scenario
async def custom_codec(stage: Stage) -> None:
    async with await stage.client() as client, await stage.agent() as agent:
        asked = await client.view.send(client.codec.create_user_message({"role": "user", "text": "hey"}))
        run = agent.create_run(asked.to_invocation())
        await run.start()
        result = await run.pipe(
            [
                {"type": "begin", "lang": "en"},
                {"type": "tok", "t": "he"},
                {"type": "tok", "t": "llo"},
                {"type": "stop"},
                {"type": "note", "level": "info", "body": "x"},
            ]
        )
        await run.end(result.reason)
        await until(lambda: asked.status == "complete")
        said: Any = [one.message for one in client.view.messages]
        assert said == [{"role": "user", "text": "hey"}, {"role": "assistant", "text": "hello"}]
