"""What the unmodified JavaScript client makes of hand-made messages (`probes.json`), and what this one makes of them.

Each probe of the harness that concerns reading is said again here. Where this client differs, on purpose, the test says
so in its name and does not look at the recorded result.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from stepwell.errors import ChannelError, HistoryFetchError
from stepwell.testing import FakeClock
from transport_kit import FIXTURES, Agent, LogChannel, client, golden, settled, shown, steps

pytestmark = pytest.mark.anyio

PROBES: dict[str, Any] = json.loads((FIXTURES / "probes.json").read_text(encoding="utf-8"))


def runs(session: Any) -> list[Any]:
    return [{"runId": run.run_id, "status": run.status, "steps": steps(run)} for run in session.view.runs]


async def late_view(channel: LogChannel) -> Any:
    async with client(channel) as late:
        await late.view.load_older(100)
        return shown(late.view)


async def test_minimal_handmade_run() -> None:
    agent = Agent(channel := LogChannel())
    async with client(channel) as session:
        agent.ask("U1", "Hello")
        agent.run("start", parent="U1", input_codec_message_id="U1")
        serial = agent.step("S")
        agent.say("hi", step="S", serial=serial, parent="U1", input="U1")
        agent.end("S", serial)
        agent.run("end", run_reason="complete")
        await settled()
        wanted = PROBES["minimal-handmade-run"]
        assert shown(session.view) == wanted["view"]
        assert runs(session) == wanted["runs"]
        assert session.view.messages[1].message["parts"] == wanted["parts"]


async def test_no_step_headers_at_all() -> None:
    agent = Agent(channel := LogChannel())
    async with client(channel) as session:
        agent.ask("U1", "Hello")
        agent.run("start", parent="U1")
        agent.say("hi", parent="U1")
        agent.run("end", run_reason="complete")
        await settled()
        assert {"view": shown(session.view), "runs": runs(session)} == PROBES["no-step-headers-at-all"]


async def test_no_run_start() -> None:
    agent = Agent(channel := LogChannel())
    async with client(channel) as session:
        agent.ask("U1", "Hello")
        agent.say("hi", parent="U1")
        await settled()
        assert {"view": shown(session.view), "runs": runs(session)} == PROBES["no-run-start"]


async def test_agent_initiated_run_without_input() -> None:
    agent = Agent(channel := LogChannel())
    async with client(channel) as session:
        agent.run("start")
        agent.say("hi")
        agent.run("end", run_reason="complete")
        await settled()
        assert {"view": shown(session.view), "runs": runs(session)} == PROBES["agent-initiated-run-without-input"]


async def test_unlike_the_reference_a_run_is_shown_before_its_input_is_loaded() -> None:
    agent = Agent(channel := LogChannel())
    async with client(channel) as session:
        agent.run("start", parent="GONE", input_codec_message_id="GONE")
        agent.say("hi", parent="GONE", input="GONE")
        await settled()
        assert PROBES["input-codec-message-id-and-parent-never-observed"] == {"view": [], "runs": []}
        assert shown(session.view) == ["assistant:hi"]


async def test_parent_never_observed_without_input_codec_message_id() -> None:
    agent = Agent(channel := LogChannel())
    async with client(channel) as session:
        agent.run("start", parent="GONE")
        agent.say("hi", parent="GONE")
        await settled()
        assert {"view": shown(session.view)} == PROBES["parent-never-observed-without-input-codec-message-id"]


async def test_create_carries_initial_text() -> None:
    agent = Agent(channel := LogChannel())
    async with client(channel) as session:
        agent.ask("U1", "Hello")
        agent.run("start", parent="U1")
        _, extras = stream = agent.open(parent="U1")
        channel.log.pop()
        stream = (channel.say("ai-output", {}, "FIRST ", extras=extras), extras)
        agent.append(stream, "second")
        agent.append(stream, "", "complete")
        await settled()
        assert {"live": shown(session.view), "late": await late_view(channel)} == PROBES["create-carries-initial-text"]


async def test_append_without_extras() -> None:
    agent = Agent(channel := LogChannel())
    async with client(channel) as session:
        agent.ask("U1", "Hello")
        agent.run("start", parent="U1")
        serial, _ = agent.open(parent="U1")
        channel.mutate(serial, "bare", None)
        await settled()
        assert {"live": shown(session.view)} == PROBES["append-without-extras"]


async def test_append_with_partial_extras_drops_run_id() -> None:
    agent = Agent(channel := LogChannel())
    async with client(channel) as session:
        errors: list[Any] = []
        session.on_error(errors.append)
        agent.ask("U1", "Hello")
        agent.run("start", parent="U1")
        serial, _ = agent.open(parent="U1")
        channel.mutate(serial, "partial", {"ai": {"transport": {"status": "streaming"}}})
        await settled()
        assert {"live": shown(session.view), "late": await late_view(channel), "errors": errors} == PROBES[
            "append-with-partial-extras-drops-run-id"
        ]


async def test_version_serial_not_advanced_on_append() -> None:
    agent = Agent(channel := LogChannel())
    async with client(channel) as session:
        agent.ask("U1", "Hello")
        agent.run("start", parent="U1")
        serial, extras = agent.open(parent="U1")
        channel.mutate(serial, "hi", extras, version=serial)
        await settled()
        assert {"live": shown(session.view)} == PROBES["version-serial-not-advanced-on-append"]


async def test_unlike_the_reference_the_order_of_pages_does_not_matter_to_status_and_steps() -> None:
    agent = Agent(channel := LogChannel())
    agent.ask("U1", "Hello")
    agent.run("start", parent="U1")
    first = agent.step("S")
    agent.say("dead", step="S", serial=first, parent="U1", close=False)
    second = agent.step("S")
    agent.say("good", "A2", step="S", serial=second, parent="U1")
    agent.end("S", second)
    agent.run("end", run_reason="complete")
    wanted = PROBES["history-oldest-first"]
    assert wanted["late"]["runs"][0]["status"] == "active"
    async with client(channel, history_page=1) as session:
        await session.view.load_older(100)
        assert shown(session.view) == wanted["late"]["view"] == wanted["live"]
        assert [(run.status, run.steps[0].status, run.steps[0].attempt_count) for run in session.view.runs] == [
            ("complete", "complete", 2)
        ]


async def test_retry_without_step_start_serial_on_outputs() -> None:
    agent = Agent(channel := LogChannel())
    async with client(channel) as session:
        agent.ask("U1", "Hello")
        agent.run("start", parent="U1")
        agent.step("S")
        agent.say("dead", step="S", parent="U1")
        agent.step("S")
        agent.say("good", "A2", step="S", parent="U1")
        await settled()
        assert {"view": shown(session.view)} == PROBES["retry-without-step-start-serial-on-outputs"]


async def test_retry_superseding_before_dead_output_arrives() -> None:
    agent = Agent(channel := LogChannel())
    async with client(channel) as session:
        agent.ask("U1", "Hello")
        agent.run("start", parent="U1")
        first, second = agent.step("S"), agent.step("S")
        agent.say("late dead", step="S", serial=first, parent="U1")
        agent.say("good", "A2", step="S", serial=second, parent="U1")
        await settled()
        wanted = PROBES["retry-superseding-before-dead-output-arrives"]
        assert {"view": shown(session.view), "runs": runs(session)} == wanted


async def test_retry_reuses_codec_message_id() -> None:
    agent = Agent(channel := LogChannel())
    async with client(channel) as session:
        agent.ask("U1", "Hello")
        agent.run("start", parent="U1")
        agent.say("dead", step="S", serial=agent.step("S"), parent="U1", close=False)
        agent.say("good", step="S", serial=agent.step("S"), parent="U1")
        await settled()
        assert {"view": shown(session.view)} == PROBES["retry-reuses-codec-message-id"]


async def test_output_stamped_with_unknown_step_start_serial() -> None:
    agent = Agent(channel := LogChannel())
    async with client(channel) as session:
        agent.ask("U1", "Hello")
        agent.run("start", parent="U1")
        agent.say("orphan", step="S", serial="zzz-never-published", parent="U1")
        await settled()
        before = shown(session.view)
        agent.step("S")
        await settled()
        assert {"beforeAnyStart": before, "afterAStart": shown(session.view)} == PROBES[
            "output-stamped-with-unknown-step-start-serial"
        ]


async def test_two_steps_same_codec_message_id_different_step_ids() -> None:
    agent = Agent(channel := LogChannel())
    async with client(channel) as session:
        agent.ask("U1", "Hello")
        agent.run("start", parent="U1")
        agent.say("one", step="S1", serial=agent.step("S1"), parent="U1")
        agent.say("two", step="S2", serial=agent.step("S2"), parent="U1")
        await settled()
        assert {"view": shown(session.view), "messages": golden(session.view)} == PROBES[
            "two-steps-same-codec-message-id-different-step-ids"
        ]


async def test_run_end_before_run_start_in_serial_order() -> None:
    agent = Agent(channel := LogChannel())
    async with client(channel) as session:
        agent.ask("U1", "Hello")
        agent.run("end", run_reason="complete")
        agent.run("start", parent="U1")
        await settled()
        assert {"runs": runs(session)} == PROBES["run-end-before-run-start-in-serial-order"]


async def test_duplicate_run_start_same_run_id() -> None:
    agent = Agent(channel := LogChannel())
    async with client(channel) as session:
        agent.ask("U1", "Hello")
        agent.run("start", parent="U1", input_codec_message_id="U1")
        agent.say("hi", parent="U1", input="U1")
        agent.run("start", parent="U1", input_codec_message_id="U1")
        await settled()
        assert {"view": shown(session.view), "runs": runs(session)} == PROBES["duplicate-run-start-same-run-id"]


async def test_run_start_after_run_end_does_not_resurrect() -> None:
    agent = Agent(channel := LogChannel())
    async with client(channel) as session:
        agent.ask("U1", "Hello")
        agent.run("start", parent="U1")
        agent.say("hi", parent="U1")
        agent.run("end", run_reason="cancelled")
        agent.run("start", parent="U1")
        agent.run("resume")
        await settled()
        assert {"runs": runs(session)} == PROBES["run-start-after-run-end-does-not-resurrect"]


async def test_second_run_end_overwrites_first() -> None:
    agent = Agent(channel := LogChannel())
    async with client(channel) as session:
        errors: list[Any] = []
        session.on_error(lambda error: errors.append(error.ids["error_code"]))
        agent.ask("U1", "Hello")
        agent.run("start", parent="U1")
        agent.say("hi", parent="U1")
        agent.run("end", run_reason="complete")
        agent.run("end", run_reason="error", error_code="104008", error_message="late")
        await settled()
        assert {"runs": runs(session), "errors": errors} == PROBES["second-run-end-overwrites-first"]


async def test_late_suspend_of_a_retired_invocation() -> None:
    agent = Agent(channel := LogChannel())
    async with client(channel) as session:
        agent.ask("U1", "Hello")
        agent.run("start", parent="U1", invocation_id="I1")
        agent.say("hi", parent="U1")
        agent.run("resume", invocation_id="I2")
        agent.run("suspend", invocation_id="I1")
        await settled()
        assert {"runs": runs(session)} == PROBES["late-suspend-of-a-retired-invocation"]


async def test_output_after_run_end() -> None:
    agent = Agent(channel := LogChannel())
    async with client(channel) as session:
        agent.ask("U1", "Hello")
        agent.run("start", parent="U1")
        agent.say("in time", parent="U1")
        agent.run("end", run_reason="complete")
        agent.say("too late", "A2", parent="U1")
        await settled()
        assert {"view": shown(session.view), "runs": runs(session)} == PROBES["output-after-run-end"]


async def test_tool_output_send_in_own_step_and_message() -> None:
    agent = Agent(channel := LogChannel())
    async with client(channel) as session:
        agent.ask("U1", "Hello")
        agent.run("start", parent="U1")
        call = {"toolCallId": "c1", "toolName": "calc"}
        agent.output("tool-input", {"q": 1}, step="S1", serial=agent.step("S1"), parent="U1", codec=call)
        done = {"step": "S2", "serial": agent.step("S2"), "parent": "U1", "codec": {"toolCallId": "c1"}}
        agent.output("tool-output-available", {"output": {"v": 2}}, "A2", **done)
        await settled()
        assert {"messages": golden(session.view)} == PROBES["tool-output-send-in-own-step-and-message"]


async def test_superseding_a_tool_step_restores_pending_tool() -> None:
    agent = Agent(channel := LogChannel())
    async with client(channel) as session:
        agent.ask("U1", "Hello")
        agent.run("start", parent="U1")
        call = {"toolCallId": "c1", "toolName": "calc"}
        agent.output("tool-input", {"q": 1}, step="S1", serial=agent.step("S1"), parent="U1", codec=call)
        done = {"step": "S2", "serial": agent.step("S2"), "parent": "U1", "codec": {"toolCallId": "c1"}}
        agent.output("tool-output-available", {"output": "wrong"}, "A2", **done)
        await settled()
        before = session.view.messages[1].message["parts"][-1]
        agent.step("S2")
        await settled()
        assert {"before": before, "after": session.view.messages[1].message["parts"][-1]} == PROBES[
            "superseding-a-tool-step-restores-pending-tool"
        ]


async def test_user_message_published_one_part_per_publish() -> None:
    agent = Agent(channel := LogChannel())
    async with client(channel) as session:
        agent.ask("U1", "part one")
        agent.ask("U1", "part two")
        await settled()
        assert {"messages": golden(session.view)} == PROBES["user-message-published-one-part-per-publish"]


async def test_non_string_header_values() -> None:
    agent = Agent(channel := LogChannel())
    async with client(channel) as session:
        errors: list[Any] = []
        session.on_error(errors.append)
        agent.ask("U1", "Hello")
        agent.run("start", parent="U1")
        serial, extras = agent.open(parent="U1")
        channel.log.pop()
        extras["ai"]["transport"]["stream"] = True
        serial = channel.say("ai-output", {}, "", extras=extras)
        channel.mutate(serial, "x", extras)
        await settled()
        assert {"view": shown(session.view), "errors": errors} == PROBES["non-string-header-values"]


async def test_history_page_failure() -> None:
    agent = Agent(channel := LogChannel())
    agent.ask("U1", "Hello")
    clock = FakeClock(auto_advance=True)
    async with client(channel, clock=clock) as session:
        channel.history_failures = [ChannelError("boom") for _ in range(4)]
        with pytest.raises(HistoryFetchError) as caught:
            await session.view.load_older(5)
        wanted = PROBES["history-page-failure"]
        assert {"code": caught.value.wire_code} == wanted["error"]
        assert clock.slept == [0.1, 0.2, 0.4]
        assert len(await session.view.load_older(5)) == wanted["revealedAfterRecovery"]


async def test_rolled_up_appends() -> None:
    agent = Agent(channel := LogChannel())
    async with client(channel) as session:
        agent.ask("U1", "Hello")
        agent.run("start", parent="U1")
        agent.append(agent.open(parent="U1"), "abc", "complete")
        await settled()
        assert {"view": shown(session.view)} == PROBES["rolled-up-appends"]


async def test_stream_left_open_at_run_end() -> None:
    agent = Agent(channel := LogChannel())
    async with client(channel) as session:
        errors: list[Any] = []
        session.on_error(lambda error: errors.append(error.ids["error_code"]))
        agent.ask("U1", "Hello")
        agent.run("start", parent="U1")
        agent.say("half", parent="U1", close=False)
        agent.run("end", run_reason="error", error_code="104008", error_message="x")
        await settled()
        assert {"view": shown(session.view), "runs": runs(session), "errors": errors} == PROBES[
            "stream-left-open-at-run-end"
        ]


async def test_raw_output_events_seen_by_a_tree_subscriber_across_a_supersede() -> None:
    agent = Agent(channel := LogChannel())
    seen: list[str] = []

    def note(change: Any) -> None:
        if type(change).__name__ == "OutputChange":
            seen.extend(one["delta"] for one in change.outputs if one["type"] == "text-delta")
            if not change.outputs and not change.inputs:
                seen.append("<empty output event>")

    async with client(channel) as session:
        session.tree.listen(note)
        agent.ask("U1", "Hello")
        agent.run("start", parent="U1")
        agent.say("dead", step="S", serial=agent.step("S"), parent="U1", close=False)
        agent.say("good", "A2", step="S", serial=agent.step("S"), parent="U1")
        await settled()
        assert {"rawEvents": seen, "view": shown(session.view)} == PROBES[
            "raw-output-events-seen-by-a-tree-subscriber-across-a-supersede"
        ]


async def test_suspend_after_run_end() -> None:
    agent = Agent(channel := LogChannel())
    async with client(channel) as session:
        agent.ask("U1", "Hello")
        agent.run("start", parent="U1", invocation_id="I1")
        agent.say("hi", parent="U1")
        agent.run("end", run_reason="complete", invocation_id="I1")
        agent.run("suspend", invocation_id="I1")
        await settled()
        assert {"runs": runs(session)} == PROBES["suspend-after-run-end"]


async def test_unknown_run_reason_and_step_reason() -> None:
    agent = Agent(channel := LogChannel())
    async with client(channel) as session:
        errors: list[Any] = []
        session.on_error(errors.append)
        agent.ask("U1", "Hello")
        agent.run("start", parent="U1")
        agent.end("S", agent.step("S"), "weird")
        agent.run("end", run_reason="timeout")
        await settled()
        assert {"runs": runs(session), "errors": errors} == PROBES["unknown-run-reason-and-step-reason"]


def test_every_probe_is_here_or_is_about_the_channel() -> None:
    about_the_channel = {
        "history-returns-create-action-for-appended-message",
        "late-attacher-gets-raw-append-instead-of-full-update",
    }
    renamed = {
        "input-codec-message-id-and-parent-never-observed",  # shown before its input is loaded
        "history-oldest-first",  # the order of pages does not matter
    }
    here = {name.removeprefix("test_").replace("_", "-") for name in globals() if name.startswith("test_")}
    assert set(PROBES) <= here | about_the_channel | renamed
