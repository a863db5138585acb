"""From measurements to tables: bars, medians, ratios."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.backends import BACKENDS
from bench.kills import PLACES
from bench.measure import OURS, PEERS, Result

Values = list[float]


@dataclass(frozen=True)
class Figure:
    """One column of the comparison, read from the results of a benchmark."""

    key: str
    title: str
    unit: str
    bench: str
    read: Callable[[Result], float | None]


def _turn(turns: str) -> Callable[[Result], float | None]:
    return lambda result: result["turn_us"].get(turns)


def _stored(result: Result) -> float | None:
    stored = result["stored"].get("1000")
    return stored / 1024 if stored is not None else None


def _growth(result: Result) -> float | None:
    turns = result["turn_us"]
    return turns["1000"] / turns["10"] if "1000" in turns else None


FIGURES = (
    Figure("one_turn", "one turn", "µs", "one_turn", lambda r: r["p50_us"]),
    Figure("conv3", "3 stages", "µs", "conv3", lambda r: r["p50_us"]),
    Figure("stream", "token", "µs", "stream", lambda r: r["per_token_net_us"]),
    Figure("persist", "3 stages, stored", "µs", "persist", lambda r: r["p50_us"]),
    Figure("bytes", "its size", "bytes", "persist", lambda r: r["bytes_per_session"]),
    Figure("turn_100", "turn 100", "µs", "growth", _turn("100")),
    Figure("turn_1000", "turn 1,000", "µs", "growth", _turn("1000")),
    Figure("stored_1000", "1,000 turns", "KB", "growth", _stored),
    Figure("fanout", "fan-out", "µs", "fanout", lambda r: r["p50_us"]),
    Figure("alloc", "3 stages, peak", "KiB", "alloc", lambda r: r["conv3_peak_kib"]),
)
IMPORT = Figure("import", "import", "ms", "import", lambda r: r["import_ms"])
RESUME = Figure("resume", "a session that waits goes on", "µs", "resume", lambda r: r["p50_us"])
GROWTH = Figure("growth", "turn 1,000 : turn 10", "x", "growth", _growth)


def _key(key: str) -> Callable[[Result], float | None]:
    return lambda result: result.get(key)


CHANNEL_FIGURES = (
    Figure("appends_1", "one writer", "appends/s", "append", _key("appends_1")),
    Figure("appends_50", "fifty writers", "appends/s", "append", _key("appends_50")),
    Figure("append_cpu", "an append of these, processor", "µs", "append", _key("append_50_cpu_us")),
    Figure("latency_p50", "delivery p50", "ms", "latency", _key("latency_p50_ms")),
    Figure("latency_p99", "delivery p99", "ms", "latency", _key("latency_p99_ms")),
    Figure("stored", "token stored", "µs", "token", _key("stored_us")),
    Figure("view", "token to a view", "µs", "token", _key("view_us")),
    Figure("view_each", "the same, no roll-up", "µs", "token", _key("view_each_us")),
    Figure("join", "late join", "ms", "join", _key("join_ms")),
    Figure("first", "its first page", "ms", "join", _key("first_ms")),
    Figure("client", "idle client", "KB", "idle", _key("client_kb")),
    Figure("agent", "idle agent", "KB", "idle", _key("agent_kb")),
    Figure("turn_bytes", "one turn", "bytes", "turn_bytes", _key("turn_bytes")),
)
# Bars are for what runs in this process: its processor time is that of a machine with nothing else to do.
PROCESSOR = (
    Figure("stored_cpu", "token stored", "µs", "token", _key("stored_cpu_us")),
    Figure("view_cpu", "token to a view", "µs", "token", _key("view_cpu_us")),
    Figure("join_cpu", "late join", "ms", "join", _key("join_cpu_ms")),
)
BY_KEY = {figure.key: figure for figure in (*FIGURES, *CHANNEL_FIGURES, *PROCESSOR, IMPORT, RESUME, GROWTH)}


@dataclass(frozen=True)
class Bar:
    """What the product must reach; `then` is the next aim."""

    figure: str
    what: str
    configuration: str
    bar: float
    then: float | None
    unit: str
    scale: float = 1.0
    subject: str = "stepwell"


BARS = (
    Bar("import", "import stepwell", "nothing optional loaded, warm byte code", 150, 100, "ms"),
    Bar("one_turn", "one turn", "memory store, no channel", 100, 70, "µs"),
    Bar("conv3", "3 stages, 3 tools", "memory store, no channel, warm", 425, 300, "µs"),
    Bar("persist", "3 stages stored, a commit per unit", "SQLite NORMAL, no channel, warm", 3, 1.5, "ms", 1e-3),
    Bar("bytes", "stored bytes of that session", "SQLite, log folded", 4, 3, "KB", 1 / 1024),
    Bar("growth", "turn 1,000 against turn 10 of one session", "SQLite NORMAL, warm", 2, 1.2, "x"),
    Bar("stored_1000", "stored after 1,000 turns", "SQLite, log folded", 1, 0.5, "MB", 1 / 1024),
    Bar(
        "resume", "resume of a suspended session", "SQLite NORMAL, loaded from the file, one tool", 50, None, "ms", 1e-3
    ),
    Bar("stream", "streaming in process, per token", "memory store, events to the caller", 5, 2, "µs"),
    Bar("view_cpu", "token to a client's view", "memory channel, roll-up 20 ms", 10, 5, "µs", subject="memory"),
    Bar("stored_cpu", "token stored", "SQLite channel NORMAL, roll-up 20 ms", 5, 2, "µs", subject="sqlite"),
    Bar("join_cpu", "late join, 100,000 tokens", "SQLite channel, closed messages", 20, 5, "ms", subject="sqlite"),
    Bar("turn_bytes", "one-unit turn in the channel log", "SQLite, log folded", 6, 4, "KB", 1 / 1024, subject="sqlite"),
    Bar("latency_p99", "delivery to another process, p99", "SQLite, 200 messages/s", 50, None, "ms", subject="sqlite"),
)


def summary(results: Sequence[Result], machine: Result, kills: Sequence[Result]) -> dict[str, Any]:
    """Medians and spreads by subject, and the bars; what the kill runs counted as it is."""
    subjects = [name for name in (*OURS, *PEERS, *BACKENDS) if any(r["peer"] == name for r in results)]
    values = {
        name: {key: found for key, figure in BY_KEY.items() if (found := _values(results, name, figure))}
        for name in subjects
    }
    medians = {name: {key: statistics.median(v) for key, v in found.items()} for name, found in values.items()}
    spreads = {name: {key: _spread(v) for key, v in found.items()} for name, found in values.items()}
    bars = [
        {
            "what": bar.what,
            "configuration": bar.configuration,
            "unit": bar.unit,
            "bar": bar.bar,
            "then": bar.then,
            "measured": None if (m := medians.get(bar.subject, {}).get(bar.figure)) is None else m * bar.scale,
            "spread": spreads.get(bar.subject, {}).get(bar.figure),
        }
        for bar in BARS
    ]
    counted = Counter(f"{r['bench']} of {r['peer']}: {r['error']}" for r in results if "error" in r)
    errors = [f"{text} ({times} times)" if times > 1 else text for text, times in counted.items()]
    optional = sorted({name for r in results for name in r.get("optional", ())})
    stopped = {r["peer"]: r["stopped_at"] for r in results if "stopped_at" in r}
    return {
        "machine": machine,
        "medians": medians,
        "spreads": spreads,
        "bars": bars,
        "backends": {name: BACKENDS[name] for name in medians if name in BACKENDS},
        "kills": list(kills),
        "errors": errors,
        "optional_modules_loaded": optional,
        "growth_stopped_at_turn": stopped,
    }


def _values(results: Sequence[Result], subject: str, figure: Figure) -> Values:
    mine = (r for r in results if r["peer"] == subject and r["bench"] == figure.bench)
    read = (figure.read(r) for r in mine if "error" not in r and "missing" not in r)
    return [value for value in read if value is not None]


def _spread(values: Values) -> float:
    """(max - min) / median."""
    return round((max(values) - min(values)) / (statistics.median(values) or 1), 2)


def print_report(report: dict[str, Any], console: Console) -> None:
    """All tables that there is something for."""
    medians = _of(report, (*OURS, *PEERS))
    if any(bar["measured"] is not None for bar in report["bars"]):
        console.print(_bars(report))
    if medians:
        console.print(_table("Medians", _matrix(medians, None)))
        if medians.get("bare"):
            console.print(_table("Times bare: what the framework costs", _matrix(medians, "bare")))
        if set(medians) & set(PEERS) and medians.get("stepwell"):
            console.print(_table("Times stepwell: above 1, stepwell takes less", _matrix(medians, "stepwell")))
        console.print(
            "bare: a hand-written asyncio loop that does the minimum. stepwell: sessions stay warm between turns (the "
            "default). stepwell_cold: every turn loads its session from the store, as the peers do. "
            "pydantic_ai_direct: model requests only, no agent."
        )
    if channels := _of(report, BACKENDS):
        console.print(_table("Channels, medians", _channels(channels)))
        for name, how in report["backends"].items():
            console.print(f"{name}: {how}.", highlight=False)
    if report["kills"]:
        console.print(_table("Writers killed with -9", _kills(report)))
        for found in report["kills"]:
            places = ", ".join(f"{PLACES[place]} {count}" for place, count in found["places"].items())
            console.print(f"{found['backend']}, the last a writer had said: {places}.", highlight=False)
            for fault in found["faults"]:
                console.print(f"[red]{found['backend']}: {fault}", highlight=False)
    for name, turn in report["growth_stopped_at_turn"].items():
        console.print(f"{name} was stopped at turn {turn} of 1,000: out of time.")
    if report["optional_modules_loaded"]:
        console.print(f"[yellow]import stepwell loads: {', '.join(report['optional_modules_loaded'])}")
    for error in report["errors"]:
        console.print(f"[yellow]{error}", highlight=False)


def _of(report: dict[str, Any], subjects: Iterable[str]) -> dict[str, dict[str, float]]:
    return {name: report["medians"][name] for name in subjects if name in report["medians"]}


def _bars(report: dict[str, Any]) -> Table:
    table = Table(title="Bars (stepwell)", title_justify="left")
    for column in BARS_HEADER:
        table.add_column(column, justify="right" if column in ("bar", "then", "measured", "spread") else "left")
    for bar in report["bars"]:
        *row, verdict = _bar(bar)
        table.add_row(*row, f"[{_COLOURS[verdict]}]{verdict}")
    return table


BARS_HEADER = ["", "configuration", "bar", "then", "measured", "spread", ""]


def _bar(bar: dict[str, Any]) -> list[str]:
    """A row of the table of bars."""
    unit, measured, then, spread = bar["unit"], bar["measured"], bar["then"], bar["spread"]
    return [
        bar["what"],
        bar["configuration"],
        f"{bar['bar']:g} {unit}",
        "-" if then is None else f"{then:g} {unit}",
        "-" if measured is None else f"{_number(measured)} {unit}",
        "-" if spread is None else f"{spread:.0%}",
        _verdict(bar),
    ]


_COLOURS = {"not measured": "dim", "above the bar": "red", "bar met": "green", "both met": "bold green"}


def _verdict(bar: dict[str, Any]) -> str:
    measured = bar["measured"]
    if measured is None:
        return "not measured"
    if measured > bar["bar"]:
        return "above the bar"
    return "bar met" if bar["then"] is None or measured > bar["then"] else "both met"


def _table(title: str, matrix: tuple[list[str], list[list[str]]]) -> Table:
    header, rows = matrix
    table = Table(title=title, title_justify="left")
    table.add_column(header[0], no_wrap=True)
    for column in header[1:]:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*row)
    return table


def _matrix(medians: dict[str, dict[str, float]], base: str | None) -> tuple[list[str], list[list[str]]]:
    """Header and rows: medians, or how often those of `base` they are."""
    shown = [figure for figure in FIGURES if any(figure.key in found for found in medians.values())]
    header = ["", *(f"{figure.title}, {figure.unit}" if base is None else figure.title for figure in shown)]
    rows = [
        [name, *(_cell(found.get(f.key), None if base is None else medians[base].get(f.key), base) for f in shown)]
        for name, found in medians.items()
        if base is None or name not in (base, "bare")
    ]
    return header, rows


def _channels(medians: dict[str, dict[str, float]]) -> tuple[list[str], list[list[str]]]:
    """A row for each figure: there are more of them than backends."""
    rows = [
        [f"{figure.title}, {figure.unit}", *(_cell(found.get(figure.key), None, None) for found in medians.values())]
        for figure in CHANNEL_FIGURES
        if any(figure.key in found for found in medians.values())
    ]
    return ["", *medians], rows


def _kills(report: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    keys = ("runs", "killed", "doubled", "lost", "unequal")
    return ["", *keys], [[found["backend"], *(str(found[key]) for key in keys)] for found in report["kills"]]


def _cell(value: float | None, base: float | None, name: str | None) -> str:
    if value is None or (name is not None and not base):
        return "-"
    return _number(value) if name is None else _number(value / (base or 1)) + "x"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


# --- a page of the documentation --------------------------------------------------------------------------------------

BLOCKS = ("bars", "frameworks", "channels", "kills")
"""What of a page is replaced, each if it was measured, between `<!-- NAME: begin -->` and `<!-- NAME: end -->`."""


def is_page(path: Path) -> bool:
    """Whether there is anything to be replaced."""
    return path.is_file() and all(_marks(name)[0] in path.read_text(encoding="utf-8") for name in BLOCKS)


def update_page(path: Path, report: dict[str, Any]) -> None:
    """Replace what is between the marks by this report; what was not measured stays."""
    text = path.read_text(encoding="utf-8")
    for name, write in zip(BLOCKS, (_bars_block, _frameworks_block, _channels_block, _kills_block), strict=True):
        begin, end = _marks(name)
        head, _, rest = text.partition(begin)
        old, found, tail = rest.partition(end)
        if not found:
            raise SystemExit(f"{path} has no {begin} ... {end}.")
        sections = write(report, old)
        if sections:
            text = f"{head}{begin}\n\n" + "\n\n".join(sections) + f"\n\n{end}{tail}"
    path.write_text(text, encoding="utf-8")


def _marks(name: str) -> tuple[str, str]:
    return f"<!-- {name}: begin -->", f"<!-- {name}: end -->"


def _bars_block(report: dict[str, Any], old: str) -> list[str]:
    if all(bar["measured"] is None for bar in report["bars"]):
        return []
    before = {line.split(" | ")[0].removeprefix("| "): line for line in old.splitlines() if line.startswith("| ")}
    lines = _rows(BARS_HEADER, [_bar(bar) for bar in report["bars"]], left=(0, 1, 6)).splitlines()
    for index, bar in enumerate(report["bars"], 2):
        if bar["measured"] is None and bar["what"] in before:
            lines[index] = before[bar["what"]]
    return ["\n".join(lines)]


def _frameworks_block(report: dict[str, Any], _: str) -> list[str]:
    medians = _of(report, (*OURS, *PEERS))
    sections = [_where(report)] if medians else []
    for title, base in (("Medians", None), ("Times bare", "bare"), ("Times Stepwell", "stepwell")):
        if medians and (base is None or (medians.get(base) and (base == "bare" or set(medians) & set(PEERS)))):
            sections += [f"#### {title}", _rows(*_matrix(medians, base), left=(0,))]
    return sections


def _channels_block(report: dict[str, Any], _: str) -> list[str]:
    medians = _of(report, BACKENDS)
    return [_where(report), _rows(*_channels(medians), left=(0,))] if medians else []


def _kills_block(report: dict[str, Any], _: str) -> list[str]:
    if not report["kills"]:
        return []
    places = [place for place in PLACES if any(place in found["places"] for found in report["kills"])]
    by_place = [[PLACES[p], *(str(found["places"].get(p, 0)) for found in report["kills"])] for p in places]
    backends = [found["backend"] for found in report["kills"]]
    return [_rows(*_kills(report), left=(0,)), _rows(["killed after", *backends], by_place, left=(0,))]


def _where(report: dict[str, Any]) -> str:
    machine = report["machine"]
    versions = ", ".join(f"{name} {text}" for name, text in machine["versions"].items())
    where = f"Python {machine['python']}, {machine['cpu']}, {machine['cores']} cores"
    return f"{where}, load {machine['load']:.1f} when it began. {versions}."


def _rows(header: list[str], rows: list[list[str]], left: tuple[int, ...]) -> str:
    marks = ["---" if index in left else "--:" for index in range(len(header))]
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, marks, *rows))
