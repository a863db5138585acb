"""The classification table as a small model of its own, against the loop: random replies, failures and policies.

The same runs show the promises P1 and P2: what a client sees, what enters history and which tools ran.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import anyio
from hypothesis import given, settings
from hypothesis import strategies as st

from loop_flows import Hooks, View, chat, verdicts, view_of
from stepwell import retry_with_model
from stepwell.errors import LlmSetupError
from stepwell.loop import CallPolicy, EmptyPolicy
from stepwell.messages import AssistantMessage, HistoryCheck
from stepwell.testing import Call, Reply, ScriptedModel, TurnHarness

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}

THROWN = ("thrown", "thrown 400", "broken", "no finish", "stall")
KINDS = (
    *THROWN, "setup", "prompt blocked", "blocked", "blocked text", "blocked call", "empty", "blank", "unspecified",
    "empty truncated", "empty malformed", "reasoning", "cut call", "malformed", "wrong", "text", "truncated", "call",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One random configuration with its script."""

    kinds: list[str]
    attempts: int
    empty: EmptyPolicy | None
    auto_reject: frozenset[str]
    always: bool
    rounds: int
    retry: bool | None
    error: str | None
    blocked: str | None
    mode: str
    schema: bool
    by_flow: bool


CASES = st.builds(
    Case,
    kinds=st.lists(st.sampled_from(KINDS), max_size=9),
    attempts=st.integers(1, 4),
    empty=st.one_of(
        st.none(), st.builds(EmptyPolicy, retries=st.sampled_from([None, None, 0, 1, 2]), accept=st.booleans())
    ),
    auto_reject=st.frozensets(st.sampled_from(["truncated", "schema"])),
    always=st.booleans(),
    rounds=st.integers(1, 5),
    retry=st.sampled_from([None, None, True, False]),
    error=st.sampled_from([None, "terminal", "alternate"]),
    blocked=st.sampled_from([None, "terminal"]),
    mode=st.sampled_from(["live", "held", "off"]),
    schema=st.booleans(),
    by_flow=st.booleans(),
)


def text_of(kind: str, number: int, schema: bool) -> str:
    """What a reply of this kind says; every reply says something else."""
    if kind == "wrong":
        return f"WRONG {number} words"
    if kind in ("text", "truncated") and schema:
        return f'{{"n":{number}}}' if kind == "text" else f'{{"n":{number}'
    return f"{kind} {number} words" if kind not in ("empty", "blank") else ""


def reply_of(kind: str, number: int, schema: bool) -> Reply:
    text = text_of(kind, number, schema)
    call = [Call("look", {"city": str(number)})]
    match kind:
        case "thrown":
            return Reply.error(status=503)
        case "thrown 400":
            return Reply.text(text).failing(status=400)
        case "broken":
            return Reply.text(text).failing(after=1)
        case "no finish":
            return Reply.reasoning("hm", text).without_finish()
        case "stall":
            return Reply.text(text).stalling(after=2)
        case "setup":
            return Reply.text(text).failing(after=1, error=lambda: LlmSetupError("no key"))
        case "prompt blocked":
            return Reply.prompt_blocked()
        case "blocked":
            return Reply.blocked()
        case "blocked text":
            return Reply.blocked(text=text)
        case "blocked call":
            return Reply.blocked(text=text, calls=call)
        case "empty" | "unspecified":
            return Reply.empty("complete" if kind == "empty" else kind)
        case "blank":
            return Reply.empty(blank="\n ")
        case "empty truncated" | "empty malformed":
            return Reply.empty("truncated" if "truncated" in kind else "malformed_tool_call")
        case "reasoning":
            return Reply.reasoning("only thoughts")
        case "cut call":
            return Reply.truncated(text, calls=call)
        case "malformed":
            return Reply.tool_calls(*call, text=text).stopping("malformed_tool_call")
        case "truncated":
            return Reply.truncated(text)
        case "call":
            return Reply.tool_calls(*call, text=text)
        case _:
            return Reply.text(text)


@dataclass
class Expected:
    """What the reference says."""

    verdicts: list[str] = field(default_factory=list)
    hooks: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    ran: list[str] = field(default_factory=list)
    message: str = ""
    error: str | None = None


class Fails(Exception):
    """The turn fails with this code."""


class Reference:
    """The table of the design, written down again as plainly as possible."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.script = self._script()
        self.rounds = 0
        self.alternate = False
        self.out = Expected()

    def _script(self) -> Iterator[tuple[int, str]]:
        number = 0
        while True:
            number += 1
            yield number, self.case.kinds[number - 1] if number <= len(self.case.kinds) else "text"

    def run(self) -> Expected:
        try:
            while (message := self.round()) is None:
                pass
            self.out.message = message
        except Fails as fails:
            self.out.error = str(fails)
        return self.out

    def begin_round(self) -> None:
        if self.rounds == self.case.rounds:
            raise Fails("agent_round_limit")
        self.rounds += 1

    def ask(self, hook: str, answer: Any) -> Any:
        """Stage first; the flow where the stage delegates."""
        self.out.hooks.append(hook)
        if self.case.by_flow or answer is None:
            self.out.hooks.append(f"flow_{hook}")
        return answer

    def classify(self, number: int, kind: str) -> str:
        case = self.case
        if kind in THROWN:
            return "thrown"
        if kind == "setup":
            return "setup"
        if "blocked" in kind:
            return "blocked"
        if kind in ("empty", "blank", "unspecified", "empty truncated", "empty malformed", "reasoning"):
            silent = kind not in ("empty truncated", "empty malformed")
            return "silent" if silent and case.empty is not None and case.empty.accept else "empty"
        if kind in ("cut call", "malformed") and "truncated" in case.auto_reject:
            return "truncated_tool_call" if kind == "cut call" else "malformed_tool_call"
        if case.schema and kind in ("wrong", "truncated") and "schema" in case.auto_reject:
            return "schema"
        self.out.hooks.append("check_response")
        return "check_response" if kind == "wrong" else "accepted"

    def round(self) -> str | None:
        """One round with its attempts; the turn's message, or `None` after tools."""
        self.begin_round()
        made = nudges = 0
        while True:
            number, kind = next(self.script)
            made += 1
            limit = 1 if self.alternate else self.case.attempts
            verdict = self.classify(number, kind)
            self.out.verdicts.append({"setup": "thrown", "silent": "accepted"}.get(verdict, verdict))
            if verdict == "setup":
                raise Fails("llm_setup")
            if verdict == "silent":
                return ""
            if verdict == "accepted":
                return self.accepted(number, kind)
            if verdict == "blocked":
                if self.ask("on_llm_blocked", self.case.blocked) is None:
                    raise Fails("llm_response_blocked")
                return "terminal"
            if not self.alternate:
                if verdict == "empty":
                    empty = self.case.empty
                    nudged = empty is not None and kind != "empty truncated"
                    if nudged and empty is not None and empty.retries is not None:
                        if nudges < empty.retries:
                            nudges += 1
                            self.begin_round()
                            made = 0
                            continue
                    elif nudged and made < limit:
                        continue
                elif made < limit and (verdict != "thrown" or self.retries(kind)):
                    continue
            answer = self.ask("on_llm_error", self.case.error)
            if answer is None:
                timed_out = "model_timeout" if kind == "stall" else "model_invocation"
                codes = {"thrown": timed_out, "empty": "llm_empty_response"}
                raise Fails(codes.get(verdict, "llm_response_rejected"))
            if answer == "terminal":
                return "terminal"
            if self.alternate:
                raise Fails("second_fallback")
            self.alternate = True
            made = 0

    def retries(self, kind: str) -> bool:
        answer = self.ask("should_retry_llm_error", self.case.retry)
        return self.case.always or kind != "thrown 400" if answer is None else answer

    def accepted(self, number: int, kind: str) -> str | None:
        text = text_of(kind, number, self.case.schema)
        self.out.said.append(text)
        if kind == "call":
            self.out.ran.append(str(number))
        return None if kind in ("call", "cut call", "malformed") else text


def hooks_of(case: Case) -> Hooks:
    prefix = "flow_" if case.by_flow else ""
    error = {"alternate": retry_with_model("scripted:spare"), "terminal": "terminal", None: None}[case.error]
    answers = {"on_llm_error": error, "on_llm_blocked": case.blocked, "should_retry_llm_error": case.retry}
    return Hooks(
        check_response=lambda candidate: candidate.text.startswith("WRONG"),
        **{prefix + name: answer for name, answer in answers.items()},
    )


async def run(case: Case) -> None:
    replies = [reply_of(kind, number, case.schema) for number, kind in enumerate(case.kinds, 1)]
    number = len(replies)

    def more(request: Any) -> Reply:
        nonlocal number
        number += 1
        return reply_of("text", number, case.schema)

    model = ScriptedModel(replies, default=more)
    hooks = hooks_of(case)
    policy = CallPolicy(
        attempts=case.attempts,
        empty=case.empty,
        auto_reject=case.auto_reject,
        default_retry="always" if case.always else "transient",
        max_agent_rounds=case.rounds,
    )
    flow = chat(hooks, policy=policy, schema=SCHEMA if case.schema else None, step={"stream_mode": case.mode})
    h = TurnHarness(flow, model=model)
    async with h.engine:
        result = await h.say("hi")
        history = await h.history("Talk")
    expected = Reference(case).run()
    assert verdicts(h) == expected.verdicts
    assert hooks.log.names == expected.hooks
    assert (result.error.code if result.error else None) == expected.error
    assert result.message == expected.message
    assert len(model.requests) == len(expected.verdicts) == sum(used.attempts for used in result.usage.values())
    # P2: checked before it counts.
    assert [m.text for m in history if isinstance(m, AssistantMessage)] == expected.said
    assert flow.stage_class.ran == expected.ran
    HistoryCheck().add_all(history)
    # P1: superseded, never doubled.
    final = [expected.message] if expected.message else []
    before = expected.said if expected.message not in expected.said else expected.said[:-1]
    assert view_of(h).visible == "\n\n".join([*(before if case.mode != "off" else []), *final])
    used = list(zip(range(len(model.requests)), Reference(case).script, strict=False))
    never_mixed(h, [text_of(kind, number, case.schema) for _, (number, kind) in used])
    if case.mode == "held" or case.schema:
        assert all(state in "\n\n".join([*expected.said, *final]) for state in states_of(h))


def states_of(h: TurnHarness) -> list[str]:
    view = View()
    for event in h.events:
        view.apply(event)
    return view.states


def never_mixed(h: TurnHarness, texts: list[str]) -> None:
    """After each event, what a step shows is the beginning of one reply or of the terminal text."""
    view = View()
    for event in h.events:
        view.apply(event)
        for shown in view.text.values():
            assert any(text.startswith(shown) for text in ("terminal", *texts)), shown


@settings(max_examples=300, deadline=None)
@given(CASES)
def test_the_loop_does_what_the_table_says(case: Case) -> None:
    anyio.run(run, case)
