"""The rules of the conversation tree, one test for each: which attempts count, what a run's status is, what is kept.

Rules are named by their place in the protocol's description. Messages are said by hand and folded directly.
"""

from __future__ import annotations

from typing import Any

import pytest

from stepwell.transport import (
    ConversationTree,
    InputNode,
    OutputChange,
    RunChange,
    RunNode,
    StepChange,
    StructureChange,
)
from stepwell.transport.codecs import UIMessageCodec
from transport_kit import Agent, LogChannel, steps


class Case:
    """A conversation said by hand, and trees that read it."""

    def __init__(self, **options: Any) -> None:
        self.channel = LogChannel()
        self.agent = Agent(self.channel)
        self.tree = ConversationTree(UIMessageCodec(), **options)
        self.read = 0

    def fold(self) -> ConversationTree[Any, Any]:
        """Read on."""
        for delivery in self.channel.log[self.read :]:
            self.tree.apply(delivery)
        self.read = len(self.channel.log)
        return self.tree

    def texts(self) -> list[str]:
        return texts(self.fold())

    def started(self, run: str = "R", **headers: str) -> None:
        self.agent.ask("U1", "Hello")
        self.agent.run("start", run, parent="U1", input_codec_message_id="U1", **headers)


def texts(tree: ConversationTree[Any, Any]) -> list[str]:
    nodes = tree.visible(lambda group: group[-1])
    return [
        "|".join(part["text"] for part in one.message["parts"] if part["type"] == "text")
        for node in nodes
        for one in node.messages
    ]


def in_order(case: Case, order: list[int]) -> ConversationTree[Any, Any]:
    """A fresh tree that gets the deliveries in another order."""
    tree = ConversationTree(UIMessageCodec())
    for place in order:
        tree.apply(case.channel.log[place])
    return tree


@pytest.fixture
def case() -> Case:
    return Case()


# --- 3.2: which attempt counts ----------------------------------------------------------------------------------------


def test_3_2_1_a_later_start_supersedes_at_once_even_if_the_attempt_stays_silent(case: Case) -> None:
    case.started()
    case.agent.say("dead", step="S", serial=case.agent.step("S"), close=False)
    assert case.texts() == ["Hello", "dead"]
    case.agent.step("S")
    assert case.texts() == ["Hello"]


def test_3_2_1_another_steps_start_supersedes_nothing(case: Case) -> None:
    case.started()
    case.agent.say("one", step="S", serial=case.agent.step("S"))
    case.agent.step("T")
    assert case.texts() == ["Hello", "one"]


def test_3_2_1_an_earlier_start_that_comes_later_supersedes_nothing(case: Case) -> None:
    case.started()
    first, second = case.agent.step("S"), case.agent.step("S")
    case.agent.say("good", step="S", serial=second)
    rows = case.channel.log
    late = next(i for i, row in enumerate(rows) if row.serial == first)
    tree = in_order(case, [i for i in range(len(rows)) if i != late] + [late])
    assert texts(tree) == ["Hello", "good"]


def test_3_2_2_attempts_are_compared_by_serial_not_by_time(case: Case) -> None:
    case.started()
    first, second = case.agent.step("S"), case.agent.step("S")
    case.agent.say("good", step="S", serial=second)
    case.agent.say("dead", "A2", step="S", serial=first)
    assert case.texts() == ["Hello", "good"]


def test_3_2_2_gated_output_comes_back_with_nothing_but_stays_in_the_log(case: Case) -> None:
    case.started()
    first = case.agent.step("S")
    case.agent.step("S")
    case.agent.say("dead", step="S", serial=first)
    case.fold()
    node = case.tree.run_node("R")
    assert node is not None
    assert [entry.attempt for entry in node.log] == [("S", first)]
    assert node.messages == []


def test_3_2_3_the_whole_run_is_folded_anew_and_listeners_are_told_without_events(case: Case) -> None:
    case.started()
    case.agent.say("kept", "A0", step="S0", serial=case.agent.step("S0"))
    case.agent.say("dead", step="S", serial=case.agent.step("S"), close=False)
    case.fold()
    told: list[Any] = []
    case.tree.listen(told.append)
    case.agent.step("S")
    assert case.texts() == ["Hello", "kept"]
    assert [type(one) for one in told] == [StepChange, OutputChange]
    assert (told[1].delivery, told[1].inputs, told[1].outputs) == (None, (), ())


def test_3_2_3_nothing_is_folded_anew_where_no_other_attempt_has_output(case: Case) -> None:
    case.started()
    first = case.agent.step("S")
    case.fold()
    told: list[Any] = []
    case.tree.listen(told.append)
    case.agent.step("S")
    case.fold()
    assert [type(one) for one in told] == [StepChange]
    assert first is not None


def test_3_2_4_late_appends_messages_and_ends_of_a_dead_attempt_change_nothing(case: Case) -> None:
    case.started()
    first = case.agent.step("S")
    stream = case.agent.say("dead", step="S", serial=first, close=False)
    second = case.agent.step("S")
    case.agent.say("good", "A2", step="S", serial=second)
    case.fold()
    told: list[Any] = []
    case.tree.listen(told.append)
    case.agent.append(stream, " zombie")
    case.agent.say("zombie", "A3", step="S", serial=first)
    case.agent.end("S", first, "failed")
    assert case.texts() == ["Hello", "good"]
    assert not any(isinstance(one, OutputChange) for one in told)
    run = case.tree.run("R")
    assert run is not None
    assert [(one.status, one.attempt_count) for one in run.steps] == [("active", 2)]


def test_3_2_5_output_without_a_start_serial_is_never_gated(case: Case) -> None:
    case.started()
    case.agent.step("S")
    case.agent.say("one", step="S")
    case.agent.step("S")
    case.agent.say("two", "A2", step="S")
    assert case.texts() == ["Hello", "one", "two"]


def test_3_2_6_output_of_an_unknown_start_is_shown_until_any_start_comes(case: Case) -> None:
    case.started()
    case.agent.say("orphan", step="S", serial="zzz")
    assert case.texts() == ["Hello", "orphan"]
    case.agent.step("S")
    assert case.texts() == ["Hello"]


def test_3_2_7_a_start_may_come_before_the_dead_output(case: Case) -> None:
    case.started()
    first, second = case.agent.step("S"), case.agent.step("S")
    case.agent.say("dead", step="S", serial=first)
    case.agent.say("good", "A2", step="S", serial=second)
    assert case.texts() == ["Hello", "good"]


def test_3_2_7_output_that_came_before_the_starts_of_its_step_is_shown_when_its_own_has_come(case: Case) -> None:
    case.started()
    first, second = case.agent.step("S"), case.agent.step("S")
    case.agent.say("good", step="S", serial=second)
    for delivery in [*case.channel.log[:2], *case.channel.log[4:]]:
        case.tree.apply(delivery)
    assert texts(case.tree) == ["Hello", "good"]
    for serial, shown in ((first, ["Hello"]), (second, ["Hello", "good"])):
        case.tree.apply(next(row for row in case.channel.log if row.serial == serial))
        assert texts(case.tree) == shown


def test_3_2_7_a_message_id_may_be_used_by_several_attempts(case: Case) -> None:
    case.started()
    case.agent.say("dead", step="S", serial=case.agent.step("S"))
    case.agent.say("good", step="S", serial=case.agent.step("S"))
    assert case.texts() == ["Hello", "good"]


def test_3_2_8_a_tools_output_of_a_superseded_attempt_is_undone_in_another_message(case: Case) -> None:
    case.started()
    call = {"toolCallId": "c1", "toolName": "calc"}
    case.agent.output("tool-input", {"q": 1}, step="S1", serial=case.agent.step("S1"), codec=call)
    attempt = {"step": "S2", "serial": case.agent.step("S2"), "codec": {"toolCallId": "c1"}}
    case.agent.output("tool-output-available", {"output": "wrong"}, "A2", **attempt)
    node = case.fold().run_node("R")
    assert node is not None
    assert node.messages[0].message["parts"][-1]["state"] == "output-available"
    case.agent.step("S2")
    case.fold()
    assert node.messages[0].message["parts"][-1]["state"] == "input-available"
    attempt["serial"] = case.channel.log[-1].serial
    case.agent.output("tool-output-available", {"output": "right"}, "A3", **attempt)
    case.fold()
    assert node.messages[0].message["parts"][-1]["output"] == "right"


def test_3_2_a_streamed_message_that_is_shown_is_not_changed_by_what_comes(case: Case) -> None:
    case.started()
    stream = case.agent.say("one", close=False)
    node = case.fold().run_node("R")
    assert node is not None
    before = node.messages[0]
    case.agent.append(stream, " two")
    case.fold()
    assert before.message["parts"][-1]["text"] == "one"
    assert node.messages[0].message["parts"][-1]["text"] == "one two"


# --- 3.3: what clients are told of steps ------------------------------------------------------------------------------


def test_3_3_steps_have_the_status_count_and_participant_of_their_canonical_attempt(case: Case) -> None:
    case.started()
    first = case.agent.step("S", step_client_id="ana")
    case.agent.end("S", first, "failed")
    case.agent.step("T", step_client_id="ben")
    second = case.agent.step("S", step_client_id="cem")
    node = case.fold().run_node("R")
    assert steps(node) == [
        {"stepId": "S", "status": "active", "attemptCount": 2, "stepClientId": "cem"},
        {"stepId": "T", "status": "active", "attemptCount": 1, "stepClientId": "ben"},
    ]
    case.agent.end("S", second, "complete")
    case.fold()
    assert steps(node)[0]["status"] == "complete"
    assert case.tree.latest_step_client_id("R") == "cem"


def test_3_3_an_attempt_known_by_its_end_only_counts(case: Case) -> None:
    case.started()
    case.agent.end("S", "00000000000000-000@aaaaaaaaaa:000", "failed")
    node = case.fold().run_node("R")
    assert steps(node) == [{"stepId": "S", "status": "active", "attemptCount": 1, "stepClientId": None}]
    case.agent.step("S")
    case.fold()
    assert steps(node) == [{"stepId": "S", "status": "active", "attemptCount": 2, "stepClientId": ""}]


def test_3_3_an_end_before_its_start_counts_when_the_start_comes(case: Case) -> None:
    case.started()
    serial = case.agent.step("S")
    case.agent.end("S", serial, "complete")
    rows = list(range(len(case.channel.log)))
    tree = in_order(case, [*rows[:-2], rows[-1], rows[-2]])
    run = tree.run("R")
    assert run is not None
    assert [(one.status, one.attempt_count) for one in run.steps] == [("complete", 1)]


def test_3_3_outputs_alone_make_no_step(case: Case) -> None:
    case.started()
    case.agent.say("orphan", step="S", serial="zzz")
    run = case.fold().run("R")
    assert run is not None
    assert run.steps == ()


def test_3_3_a_start_makes_a_run_and_an_end_does_not(case: Case) -> None:
    case.agent.end("S", "00000000000000-000@aaaaaaaaaa:000", run="Q")
    case.agent.end("T", "00000000000000-000@aaaaaaaaaa:000", run="R")
    case.agent.step("S", "R")
    tree = case.fold()
    assert [(run.run_id, run.status) for run in tree.runs] == [("R", "active")]
    # The end of T was said when nobody had heard of the run.
    assert [step.step_id for step in tree.runs[0].steps] == ["S"]


def test_3_3_the_highest_index_of_an_invocations_steps(case: Case) -> None:
    case.started()
    for name in ("I1-step-0", "I1-step-10", "I1-step-2", "I2-step-77", "I1-step-x", "I1-step-²", "other"):
        case.agent.step(name)
    tree = case.fold()
    assert tree.highest_step_index("R", "I1") == 10
    assert tree.highest_step_index("R", "I3") is None
    assert tree.highest_step_index("no run", "I1") is None
    assert tree.latest_step_client_id("no run") is None


# --- 3.4: how long events are kept ------------------------------------------------------------------------------------


def finished(*, settled: bool, end: bool = True) -> Case:
    """A run with a dead attempt whose text is shown, all of it said at second 1."""
    case = Case(reorder_window=120.0)
    case.agent.ask("U1", "Hello")
    case.agent.run("start", parent="U1", time=1_000)
    serial = case.agent.step("S")
    case.agent.say("old", step="S", serial=serial)
    if settled:
        case.agent.end("S", serial, "failed")
    if end:
        case.agent.run("end", run_reason="complete", time=1_000)
    case.fold()
    return case


def later(case: Case, milliseconds: int) -> None:
    """Channel time moves on, by another run's message."""
    case.agent.run("start", "other", time=1_000 + milliseconds)
    case.fold()


@pytest.mark.parametrize(("after", "taken_back"), [(120_000, True), (120_001, False)])
def test_3_4_a_finished_run_can_be_superseded_within_the_window_of_channel_time(after: int, taken_back: bool) -> None:
    case = finished(settled=True)
    later(case, after)
    case.agent.step("S")
    assert ("old" not in case.texts()) == taken_back


def test_3_4_a_run_with_an_open_step_keeps_its_events() -> None:
    case = finished(settled=False)
    later(case, 10_000_000)
    case.agent.step("S")
    assert "old" not in case.texts()


def test_3_4_an_unfinished_run_keeps_its_events() -> None:
    case = finished(settled=True, end=False)
    later(case, 10_000_000)
    case.agent.step("S")
    assert "old" not in case.texts()


def test_3_4_a_step_that_is_settled_later_lets_the_events_go() -> None:
    case = finished(settled=False)
    later(case, 10_000_000)
    serial = next(row.serial for row in case.channel.log if row.name == "ai-step-start")
    case.agent.end("S", serial, "failed")
    later(case, 30_000_000)
    case.agent.step("S")
    assert "old" in case.texts()


def test_3_4_what_was_seen_is_not_folded_again_when_the_events_are_gone() -> None:
    case = finished(settled=True)
    later(case, 200_000)
    for delivery in list(case.channel.log):
        case.tree.apply(delivery)
    assert case.texts() == ["Hello", "old"]


def test_3_4_what_comes_after_the_window_is_folded_where_it_comes() -> None:
    case = finished(settled=True)
    later(case, 200_000)
    case.agent.say("late", "A2")
    assert "late" in case.texts()


def test_3_4_what_waits_to_be_folded_is_folded_before_the_events_go() -> None:
    case = finished(settled=True)
    case.agent.output("data-late", {"n": 1}, "A2", step="S")
    tree = ConversationTree(UIMessageCodec(), reorder_window=120.0)
    rows = case.channel.log
    for delivery in [*rows[:3], rows[-1], *rows[3:-1]]:
        tree.apply(delivery)
    case.tree = tree
    case.read = len(rows)
    later(case, 200_000)
    assert case.texts() == ["Hello", "old", ""]
    node = tree.run_node("R")
    assert node is not None
    assert node.log.swept


def test_3_4_an_input_of_this_client_is_not_shown_ahead_where_it_could_not_be_replaced(case: Case) -> None:
    case = finished(settled=True)
    event = case.tree.codec.create_user_message({"id": "u", "role": "user", "parts": [{"type": "text", "text": "t"}]})
    case.tree.insert_local(event, {"codec-message-id": "T1", "role": "user", "run-id": "R"})
    later(case, 200_000)
    assert case.texts() == ["Hello", "old", "t"]  # nothing goes as long as it has not come back
    case.agent.ask("T1", "t", run_id="R")
    later(case, 400_000)
    assert case.texts() == ["Hello", "old", "t"]
    case.tree.insert_local(event, {"codec-message-id": "T2", "role": "user", "run-id": "R"})
    assert case.texts() == ["Hello", "old", "t"]
    case.agent.ask("T2", "t2", run_id="R")
    assert case.texts() == ["Hello", "old", "t", "t2"]


def test_3_4_history_is_never_emptied_in_the_middle_of_a_page() -> None:
    case = finished(settled=True)
    tree = ConversationTree(UIMessageCodec(), reorder_window=120.0)
    case.agent.run("start", "other", time=10_000_000)
    tree.apply(case.channel.log[-1])
    rows = case.channel.log[:-1]
    with tree.history():
        for delivery in rows:
            tree.apply(delivery)
    case.agent.step("S")
    tree.apply(case.channel.log[-1].__class__(**{**_fields(case.channel.log[-1]), "timestamp": 1}))
    assert "old" not in texts(tree)


def _fields(delivery: Any) -> dict[str, Any]:
    return {name: getattr(delivery, name) for name in delivery.__struct_fields__}


# --- 4.5: the status of a run -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("said", "status"),
    [
        (["start"], "active"),
        (["start", "suspend I1"], "suspended"),
        (["start", "suspend I1", "resume I2"], "active"),
        (["start", "suspend I1", "start"], "active"),
        (["start", "end complete"], "complete"),
        (["start", "end timeout"], "timeout"),
        (["start", "end cancelled", "start"], "cancelled"),
        (["start", "end cancelled", "resume I2"], "cancelled"),
        (["start", "end complete", "suspend I1"], "suspended"),
        (["start", "end complete", "suspend I1", "resume I2"], "active"),
        (["start", "end complete", "end cancelled"], "cancelled"),
        (["start", "resume I2", "suspend I1"], "active"),
        (["start", "resume I2", "suspend I2"], "suspended"),
        (["start", "resume I2", "suspend"], "suspended"),
        (["start", "resume", "suspend I1"], "suspended"),
        (["end complete", "start"], "active"),
        (["suspend I1", "start"], "active"),
        (["resume I2", "start", "suspend I1"], "suspended"),
    ],
)
def test_4_5_the_status_machine_in_every_order_of_arrival(case: Case, said: list[str], status: str) -> None:
    for one in said:
        verb, _, word = one.partition(" ")
        key = {"end": "run_reason"}.get(verb, "invocation_id")
        case.agent.run(verb, **({key: word} if word else {}))
    places = list(range(len(said)))
    for order in (places, places[::-1], [*places[1:], 0], [*places, *places]):
        run = in_order(case, order).run("R")
        assert run is not None
        assert run.status == status, order


def test_4_5_end_suspension_and_resumption_make_no_run(case: Case) -> None:
    case.agent.run("end", "A", run_reason="complete")
    case.agent.run("suspend", "B")
    case.agent.run("resume", "C")
    assert case.fold().runs == []
    assert case.tree.run_node("A") is None
    assert case.tree.node("A") is None


def test_4_5_an_error_is_told_with_its_code(case: Case) -> None:
    case.started()
    case.agent.run("end", run_reason="error", error_code="42910", error_message="quota")
    run = case.fold().run("R")
    assert run is not None
    assert run.error is not None
    assert (run.status, run.error.code, run.error.message, run.error.status_code) == ("error", 42910, "quota", 429)
    case.agent.run("end", run_reason="complete")
    run = case.fold().run("R")
    assert run is not None
    assert (run.status, run.error) == ("complete", None)


def test_4_5_output_after_the_end_is_shown(case: Case) -> None:
    case.started()
    case.agent.run("end", run_reason="complete")
    case.agent.say("too late")
    assert case.texts() == ["Hello", "too late"]


def test_4_5_the_first_start_says_who_and_where_and_later_ones_fill_what_it_left_out(case: Case) -> None:
    case.agent.ask("U1", "Hello")
    case.agent.run("start", run_client_id="ana", invocation_id="I1")
    case.agent.run("start", run_client_id="ben", invocation_id="I2", parent="U1")
    node = case.fold().run_node("R")
    assert node is not None
    assert (node.client_id, node.invocation_id, node.parent, node.serial) == (
        "ana",
        "I1",
        "U1",
        case.channel.log[1].serial,
    )


# --- 4.11: the tree ---------------------------------------------------------------------------------------------------


def test_4_11_messages_go_to_inputs_and_runs(case: Case) -> None:
    case.started()
    case.agent.say("hi")
    case.agent.ask("T1", "steer", run_id="R")
    tree = case.fold()
    owners = [tree.node_of(name) for name in ("U1", "A1", "T1")]
    assert [type(one) for one in owners] == [InputNode, RunNode, RunNode]
    assert [one.key for one in owners if one is not None] == ["U1", "R", "R"]
    assert isinstance(owners[0], InputNode)
    assert owners[0].codec_message_id == "U1"
    assert tree.node_of("nobody") is None
    assert tree.node("U1") is owners[0]


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 1, 0], [1, 2, 0]])
def test_4_11_nodes_stand_in_the_order_of_the_channel(case: Case, order: list[int]) -> None:
    case.agent.ask("U1", "one")
    case.agent.ask("U2", "two")
    case.agent.ask("U3", "three")
    assert texts(in_order(case, order)) == ["one", "two", "three"]


def test_4_11_a_run_stands_where_its_earliest_message_is(case: Case) -> None:
    case.agent.run("start", "R1")
    case.agent.ask("U2", "two", parent="A0")
    case.agent.say("one", run="R1")
    assert texts(in_order(case, [2, 3, 1])) == ["two", "one"]
    assert texts(in_order(case, [2, 3, 1, 0])) == ["one", "two"]


def test_4_11_an_unknown_parent_is_a_root_until_it_comes(case: Case) -> None:
    case.agent.ask("U0", "zero")
    case.agent.ask("U0b", "zero again", fork_of="U0")
    case.agent.ask("U1", "one", parent="U0")
    rows = case.channel.log
    assert texts(in_order(case, [2])) == ["one"]
    assert texts(in_order(case, [2, 0])) == ["zero", "one"]
    assert texts(in_order(case, list(range(len(rows))))) == ["zero again"]


def test_4_11_runs_with_the_same_parent_are_siblings_and_the_newest_is_shown(case: Case) -> None:
    case.started("R1")
    case.agent.say("first", run="R1")
    case.agent.run("start", "R2", parent="U1", msg_regenerate="A1")
    case.agent.say("second", "A2", run="R2")
    tree = case.fold()
    node = tree.run_node("R1")
    assert node is not None
    assert [one.key for one in tree.siblings(node)] == ["R1", "R2"]
    assert [one.key for one in tree.replies("U1")] == ["R1", "R2"]
    assert texts(tree) == ["Hello", "second"]


def test_4_11_inputs_are_siblings_by_chains_of_forks_under_one_parent(case: Case) -> None:
    case.agent.ask("U1", "one")
    case.agent.ask("U2", "two", fork_of="U1")
    case.agent.ask("U3", "three", fork_of="U2")
    case.agent.ask("U4", "not linked")
    case.agent.ask("U5", "elsewhere", fork_of="U1", parent="U4")
    tree = case.fold()
    node = tree.node("U2")
    assert node is not None
    assert [one.key for one in tree.siblings(node)] == ["U1", "U2", "U3"]
    assert texts(tree) == ["three", "not linked", "elsewhere"]


def test_4_11_edits_that_name_each_other_do_no_harm(case: Case) -> None:
    case.agent.ask("U1", "one", fork_of="U2")
    case.agent.ask("U2", "two", fork_of="U1")
    assert len(case.texts()) >= 1


def fork(case: Case) -> list[str]:
    """A suspended run, a tool's result that goes on from it, and the run that takes it up. The names of the rows."""
    case.started("R1", invocation_id="I1")
    call = {"toolCallId": "c1", "toolName": "locate"}
    case.agent.output("tool-input", {}, run="R1", input="U1", codec=call)
    case.agent.run("suspend", "R1", invocation_id="I1")
    head = {"role": "assistant", "codec-message-id": "F", "event-id": "e-F", "parent": "U1", "supersedes": "R1"}
    seed = [
        {"codecMessageId": "F", "message": {"id": "m1", "role": "assistant", "parts": [{"type": "text", "text": "s"}]}}
    ]
    data = {"output": {"city": "Rome"}, "forkSeed": {"messages": seed}}
    codec = {"kind": "tool-result", "toolCallId": "c1"}
    case.channel.say("ai-input", {**head, "stream": "false"}, data, codec)
    case.agent.run("start", "R2", parent="U1", input_codec_message_id="F")
    case.agent.step("S", "R2")
    case.agent.say("You are in Rome", "A2", run="R2", input="F", parent="F")
    case.agent.run("end", "R2", run_reason="complete")
    return [str(row.name) for row in case.channel.log]


def test_4_11_a_tools_result_begins_a_run_that_hides_the_one_it_goes_on_from(case: Case) -> None:
    fork(case)
    for delivery in case.channel.log[:5]:
        case.tree.apply(delivery)
    assert texts(case.tree) == ["Hello", "s"]
    case.read = 5
    assert case.texts() == ["Hello", "s", "You are in Rome"]
    assert [(run.run_id, run.status) for run in case.tree.runs] == [("R1", "suspended"), ("R2", "complete")]
    assert case.tree.node("F") is None
    owner = case.tree.node_of("F")
    assert owner is not None
    assert owner.key == "R2"


def test_4_11_a_fork_is_taken_up_in_every_order_of_arrival(case: Case) -> None:
    fork(case)
    case.fold()
    places = list(range(len(case.channel.log)))
    for shift in places:
        for order in (places[shift:] + places[:shift], places[:shift][::-1] + places[shift:][::-1]):
            streams = [one for one in order if case.channel.log[one].action != "create" or one in (7,)]
            if streams != sorted(streams):
                continue  # a message's own mutations come in their order
            tree = in_order(case, order)
            assert texts(tree) == ["Hello", "s", "You are in Rome"], order
            assert tree.runs == case.tree.runs, order


def test_4_11_the_rename_is_told(case: Case) -> None:
    fork(case)
    told: list[Any] = []
    case.tree.listen(told.append)
    case.fold()
    assert [(one.renamed, one.node.key) for one in told if isinstance(one, StructureChange) and one.renamed] == [
        ("F", "R2")
    ]


def test_4_11_an_edit_of_a_discrete_message_is_not_taken(case: Case) -> None:
    serial = case.agent.ask("U1", "one")
    case.channel.mutate(serial, "changed", None, action="update")
    assert case.texts() == ["one"]


def test_4_11_what_comes_late_is_folded_in_its_place(case: Case) -> None:
    case.started()
    case.agent.output("data-a", {"n": 1}, step="S")
    case.agent.output("data-b", {"n": 2}, step="S")
    node = in_order(case, [0, 1, 3, 2]).run_node("R")
    assert node is not None
    assert [part["type"] for part in node.messages[0].message["parts"]] == ["data-a", "data-b"]


def test_4_11_an_input_is_found_by_its_event_id_first_part_first(case: Case) -> None:
    first = case.agent.ask("U1", "one")
    case.agent.ask("U1", "two")
    found = in_order(case, [1, 0]).input_event("e-U1")
    assert found is not None
    assert found.serial == first
    assert case.tree.input_event("e-U1") is None


def test_4_11_a_local_input_is_last_until_its_echo_gives_it_its_place(case: Case) -> None:
    codec = case.tree.codec
    event = codec.create_user_message({"id": "u", "role": "user", "parts": [{"type": "text", "text": "mine"}]})
    case.tree.insert_local(event, {"codec-message-id": "U9", "role": "user"})
    assert texts(case.tree) == ["mine"]
    case.agent.ask("U9", "as it came back")
    case.agent.ask("U1", "other")
    assert case.texts() == ["as it came back", "other"]
    told: list[Any] = []
    case.tree.listen(told.append)
    case.tree.remove_local("U9")
    assert case.texts() == ["as it came back", "other"]
    assert told == []


def test_4_11_a_local_input_is_taken_back_and_leaves_nothing(case: Case) -> None:
    codec = case.tree.codec
    event = codec.create_user_message({"id": "u", "role": "user", "parts": [{"type": "text", "text": "mine"}]})
    case.agent.ask("U1", "one")
    case.fold()
    case.tree.insert_local(event, {"codec-message-id": "U9", "role": "user", "parent": "U1"})
    assert case.texts() == ["one", "mine"]
    case.tree.remove_local("U9")
    assert case.texts() == ["one"]
    assert case.tree.node_of("U9") is None
    case.tree.remove_local("U9")


def test_4_11_a_local_input_into_a_run_gives_way_to_its_echo_only(case: Case) -> None:
    case.started()
    codec = case.tree.codec
    case.fold()
    event = codec.create_user_message({"id": "u", "role": "user", "parts": [{"type": "text", "text": "steer"}]})
    case.tree.insert_local(event, {"codec-message-id": "T1", "role": "user", "run-id": "R"})
    case.agent.say("hi")
    assert case.texts() == ["Hello", "hi", "steer"]
    case.agent.ask("T1", "steer", run_id="R")
    case.agent.say("again", "A2")
    assert case.texts() == ["Hello", "hi", "steer", "again"]


def test_changes_are_told_until_the_listener_is_taken_off(case: Case) -> None:
    told: list[Any] = []
    stop = case.tree.listen(told.append)
    case.started()
    case.fold()
    kinds = [type(one) for one in told]
    assert kinds == [StructureChange, OutputChange, StructureChange, RunChange]
    assert told[-1].event.verb == "start"
    assert told[-1].run is case.tree.run_node("R")
    stop()
    stop()
    case.agent.say("hi")
    case.fold()
    assert len(told) == len(kinds)


def test_steering_stamps_are_kept_and_unreadable_ones_are_not(case: Case) -> None:
    case.started()
    case.agent.say("a", steers='["T1", 3, "T2"]')
    case.agent.say("b", "A2", steers="{")
    case.agent.say("c", "A3", steers='"T3"')
    node = case.fold().run_node("R")
    assert node is not None
    assert node.answered == {"T1", "T2"}
