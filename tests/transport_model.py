"""Random conversations, and what is to be shown of them.

The model is written from the protocol's description, reads the full log from its beginning every time, and shares no
code with the product.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from random import Random
from typing import Any

from stepwell.wire import Delivery
from transport_kit import Agent, LogChannel

OFTEN = [0, 1, 2, 2, 3, 3, 3, 4, 4, 4, 5, 6, 7, 7, 7, 8, 9, 10, 10, 11, 11, 12, 12, 13, 14]
"""What is done, by how often: a conversation needs runs, attempts and streams before it can go wrong."""

BEGINNING = [0, 2, 3, 4, 7]
"""What every conversation begins with: a question, its run, an attempt, and what it says."""

# --- the model --------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    serial: str | None = None
    parent: str | None = None
    regenerates: str | None = None
    status: str = "active"
    resumed_by: str | None = None
    client: str = ""
    invocation: str = ""
    rows: list[tuple[str, str, str, tuple[str, str] | None]] = field(default_factory=list)  # serial, id, text, attempt


@dataclass
class Input:
    serial: str
    parent: str | None
    fork_of: str | None
    rows: list[tuple[str, str, str, tuple[str, str] | None]] = field(default_factory=list)


class Model:
    def __init__(self, log: list[Delivery]) -> None:
        self.runs: dict[str, Run] = {}
        self.inputs: dict[str, Input] = {}
        self.steps: dict[str, dict[str, dict[str, Any]]] = {}
        self.hidden: set[str] = set()
        self.owner: dict[str, Any] = {}
        self.forks: dict[str, str] = {}
        texts: dict[str, str] = {}
        for row in log:
            if row.action == "append":
                texts[row.serial] += row.data if isinstance(row.data, str) else ""
            else:
                texts[row.serial] = row.data if isinstance(row.data, str) else ""
        # No message is created before another that is in front of it in the log, so this is the order of serials.
        for row in log:
            if row.action == "create":
                self._read(row, texts[row.serial])

    def _read(self, row: Delivery, text: str) -> None:
        assert row.extras is not None
        head = row.extras["ai"]["transport"]
        run_id = head.get("run-id")
        name = row.name or ""
        if name.startswith("ai-run-"):
            self._lifecycle(name, run_id, head, row.serial)
        elif name == "ai-step-start":
            self.runs.setdefault(run_id, Run())
            step = self.steps.setdefault(run_id, {}).setdefault(head["step-id"], {"starts": {}, "ends": {}})
            step["starts"][row.serial] = head.get("step-client-id", "")
        elif name == "ai-step-end" and run_id in self.runs:
            step = self.steps.setdefault(run_id, {}).setdefault(head["step-id"], {"starts": {}, "ends": {}})
            step["ends"][head["step-start-serial"]] = head["step-reason"]
        elif name in ("ai-input", "ai-output"):
            self._content(run_id, head, row.serial, text)

    def _content(self, run_id: str | None, head: dict[str, str], serial: str, text: str) -> None:
        message = head["codec-message-id"]
        attempt = (head["step-id"], head["step-start-serial"]) if "step-start-serial" in head else None
        if run_id is None and head["role"] == "user":
            made = self.inputs.setdefault(message, Input(serial, head.get("parent"), head.get("fork-of")))
            made.rows.append((serial, message, text, None))
            self.owner[message] = made
            return
        if run_id is None:
            self.hidden.add(head["supersedes"])
            run_id = self.forks.setdefault(message, message)
        run = self.runs.setdefault(run_id, Run())
        if run.serial is None:
            run.serial, run.parent, run.client = serial, head.get("parent"), head.get("run-client-id", run.client)
        run.rows.append((serial, message, text, attempt))
        self.owner[message] = run

    def _lifecycle(self, name: str, run_id: str, head: dict[str, str], serial: str) -> None:
        answered = head.get("input-codec-message-id", "")
        if name == "ai-run-start":
            fork = self.forks.get(answered)
            if fork is not None and fork == answered and fork in self.runs and run_id not in self.runs:
                self.runs[run_id] = self.runs.pop(fork)
                self.forks[answered] = run_id
            run = self.runs.setdefault(run_id, Run())
            run.serial = run.serial or serial
            run.parent = head.get("parent")
            run.regenerates = head.get("msg-regenerate")
            run.client = head.get("run-client-id", "")
            run.invocation = head.get("invocation-id", "")
            if run.status == "suspended":
                run.status = "active"
            return
        run = self.runs.get(run_id)
        if run is None:
            return
        who = head.get("invocation-id", "")
        if name == "ai-run-end":
            run.status = head["run-reason"]
        elif name == "ai-run-suspend" and (run.resumed_by is None or who in ("", run.resumed_by)):
            run.status = "suspended"
        elif name == "ai-run-resume":
            run.resumed_by = who or run.resumed_by
            if run.status == "suspended":
                run.status = "active"

    # -- what is shown

    def messages_of(self, node: Any) -> list[tuple[str, str]]:
        out: dict[str, str] = {}
        steps: dict[str, dict[str, Any]] = {}
        if isinstance(node, Run):
            steps = self.steps.get(self.id_of(node), {})
        for _, message, text, attempt in sorted(node.rows):
            starts = steps.get(attempt[0], {"starts": {}})["starts"] if attempt else {}
            if attempt and starts and attempt[1] != max(starts):
                continue
            out[message] = out.get(message, "") + text
        return list(out.items())

    def id_of(self, node: Any) -> str:
        pool: dict[str, Any] = self.runs if isinstance(node, Run) else self.inputs
        return next(key for key, one in pool.items() if one is node)

    def root(self, key: str) -> str:
        while (before := self.inputs[key].fork_of) in self.inputs and (
            self.inputs[before].parent == self.inputs[key].parent
        ):
            key = before
        return key

    def group(self, key: str, node: Any) -> tuple[Any, list[str]]:
        """The group's name, and its members, oldest first."""
        if isinstance(node, Run):
            keys = [k for k, one in self.runs.items() if one.parent == node.parent and k not in self.hidden]
            return ("run", node.parent), sorted(keys, key=lambda k: self.runs[k].serial or "~")
        root = self.root(key)
        keys = [k for k in self.inputs if self.root(k) == root]
        return ("input", root), sorted(keys, key=lambda k: self.inputs[k].serial)

    def visible(self, pins: dict[Any, str]) -> list[tuple[str, Any]]:
        nodes: list[tuple[str, Any]] = [*self.inputs.items(), *self.runs.items()]
        nodes.sort(key=lambda one: one[1].serial or "~")
        path: list[tuple[str, Any]] = []
        for key, node in nodes:
            parent = self.owner.get(node.parent)
            if key in self.hidden or (parent is not None and not any(one is parent for _, one in path)):
                continue
            name, group = self.group(key, node)
            if len(group) > 1 and key != pins.get(name, group[-1]):
                continue
            path.append((key, node))
        return path

    def shown(self, pins: dict[Any, str]) -> list[tuple[str, str]]:
        path = [node for _, node in self.visible(pins)]
        inner = [run for node in path if isinstance(node, Run) for runs in self._slots(node) for run in runs]
        out: list[tuple[str, str]] = []
        for node in path:
            if not any(node is one for one in inner):
                self._emit(node, out)
        return out

    def _slots(self, node: Any) -> list[list[Run]]:
        """For every message but the first: the runs that make it anew, oldest first."""
        own = self.messages_of(node)
        slots: list[list[Run]] = []
        for before, target in itertools.pairwise(own):
            made = [
                run
                for key, run in self.runs.items()
                if run.parent == before[0] and run.regenerates == target[0] and key not in self.hidden
            ]
            slots.append(sorted(made, key=lambda run: run.serial or "~"))
        return slots

    def _emit(self, node: Any, out: list[tuple[str, str]]) -> None:
        own = self.messages_of(node)
        slots = [[], *self._slots(node)] if isinstance(node, Run) else [[] for _ in own]
        for message, made in zip(own, slots, strict=False):
            if made:
                self._emit(made[-1], out)
                return
            out.append(message)

    def pin(self, pins: dict[Any, str], before: list[str]) -> None:
        """Inputs that were shown and have siblings now stay."""
        for key in before:
            if key in self.inputs:
                name, group = self.group(key, self.inputs[key])
                if len(group) > 1:
                    pins.setdefault(name, key)

    def infos(self) -> list[Any]:
        out: list[Any] = []
        for key, run in sorted(self.runs.items(), key=lambda one: one[1].serial or "~"):
            steps = [
                (
                    name,
                    (step["ends"].get(max(step["starts"]), "active") if step["starts"] else "active"),
                    len(step["starts"].keys() | step["ends"].keys()),
                    step["starts"][max(step["starts"])] if step["starts"] else None,
                )
                for name, step in self.steps.get(key, {}).items()
            ]
            out.append((key, run.client, run.invocation, run.status, steps))
        return out


# --- the conversation -------------------------------------------------------------------------------------------------


class Talk:
    """Says random things, as several agents and clients with their faults would.

    Args:
        channel: Where.
        tidy: What is made anew a second time is made anew as the first answer, which is what clients ask for.
    """

    def __init__(self, channel: LogChannel, *, tidy: bool = False) -> None:
        self.channel = channel
        self.tidy = tidy
        self.agent = Agent(channel)
        self.runs: list[str] = []
        self.attempts: list[tuple[str, str, str]] = []
        self.streams: list[Any] = []
        self.count = 0
        self.forked = False

    def new(self, letter: str) -> str:
        self.count += 1
        return f"{letter}{self.count}"

    def act(self, kind: int, random: Random) -> None:
        model = Model(self.channel.log)
        agent = self.agent
        if kind == 0:
            shown = model.shown({})
            parent = {"parent": shown[-1][0]} if shown else {}
            agent.ask(name := self.new("U"), f"ask {name}", **parent)
        elif kind == 1 and model.inputs:
            key = random.choice(list(model.inputs))
            old = model.inputs[key].parent
            self.forked = True
            agent.ask(name := self.new("U"), f"edit {name}", fork_of=key, **({"parent": old} if old else {}))
        elif kind == 2 and model.inputs:
            key = random.choice(list(model.inputs))
            self.start(parent=key, input_codec_message_id=key)
        elif kind == 3 and self.runs:
            run = random.choice(self.runs)
            step = random.choice(["S1", "S2"])
            self.attempts.append((run, step, agent.step(step, run, step_client_id=random.choice(["", "ana"]))))
        elif kind in (4, 5) and self.attempts:
            run, step, serial = random.choice(self.attempts)
            message = random.choice([self.new("A"), f"A-{run}"])
            self.streams.append(agent.open(message, run, step=step, serial=serial))
        elif kind == 6 and self.runs:
            self.streams.append(agent.open(self.new("A"), random.choice(self.runs)))
        elif kind in (7, 8) and self.streams:
            agent.append(random.choice(self.streams), self.new(" w"))
        elif kind == 9 and self.streams:
            stream = self.streams.pop(random.randrange(len(self.streams)))
            agent.append(stream, "", random.choice(["complete", "cancelled"]))
        elif kind == 10 and self.attempts:
            run, step, serial = random.choice(self.attempts)
            agent.end(step, serial, random.choice(["complete", "failed"]), run)
        elif kind == 11 and self.runs:
            who = random.choice(["I1", "I2"])
            verb = random.choice(["end", "suspend", "resume", "start"])
            run = random.choice(self.runs)
            if verb == "end":
                agent.run("end", run, run_reason=random.choice(["complete", "cancelled"]), invocation_id=who)
            elif verb != "start":
                agent.run(verb, run, invocation_id=who)
        elif kind == 12 and model.runs:
            self.regenerate(model, random)
        elif kind == 13 and self.runs:
            run = random.choice(self.runs)
            agent.ask(self.new("T"), "steer", run_id=run)
        elif kind == 14 and self.runs:
            run = random.choice(self.runs)
            parent = model.runs[run].parent if run in model.runs else None
            fork = self.new("F")
            agent.ask(
                fork,
                "result",
                role="assistant",
                supersedes=run,
                run_client_id="ana",
                **({"parent": parent} if parent else {}),
            )
            if random.random() < 0.7:
                self.start(input_codec_message_id=fork, **({"parent": parent} if parent else {}))

    def start(self, **headers: str) -> None:
        self.runs.append(self.new("R"))
        self.agent.run("start", self.runs[-1], run_client_id="ana", invocation_id="I1", **headers)

    def regenerate(self, model: Model, random: Random) -> None:
        run = random.choice(list(model.runs.values()))
        own = model.messages_of(run)
        if not own:
            return
        place = random.randrange(len(own))
        parent = own[place - 1][0] if place else run.parent
        target = run.regenerates if self.tidy and place == 0 and run.regenerates is not None else own[place][0]
        if parent is not None:
            self.start(parent=parent, msg_regenerate=target, input_codec_message_id=self.new("C"))
