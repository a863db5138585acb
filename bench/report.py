"""From measurements to tables: bars, medians, ratios."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

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
GROWTH = Figure("growth", "turn 1,000 : turn 10", "x", "growth", _growth)
BY_KEY = {figure.key: figure for figure in (*FIGURES, IMPORT, GROWTH)}


@dataclass(frozen=True)
class Bar:
    """What the product must reach; `then` is the next aim."""

    figure: str
    what: str
    configuration: str
    bar: float
    then: float
    unit: str
    scale: float = 1.0


BARS = (
    Bar("import", "import stepwell", "nothing optional loaded, warm byte code", 150, 100, "ms"),
    Bar("one_turn", "one turn", "memory store, no channel", 100, 70, "µs"),
    Bar("conv3", "3 stages, 3 tools", "memory store, no channel, warm", 425, 300, "µs"),
    Bar("persist", "3 stages stored, a commit per unit", "SQLite NORMAL, no channel, warm", 3, 1.5, "ms", 1e-3),
    Bar("bytes", "stored bytes of that session", "SQLite, log folded", 4, 3, "KB", 1 / 1024),
    Bar("growth", "turn 1,000 against turn 10 of one session", "SQLite NORMAL, warm", 2, 1.2, "x"),
    Bar("stored_1000", "stored after 1,000 turns", "SQLite, log folded", 1, 0.5, "MB", 1 / 1024),
    Bar("stream", "streaming in process, per token", "memory store, events to the caller", 5, 2, "µs"),
)


def summary(results: Sequence[Result], machine: Result) -> dict[str, Any]:
    """Medians and spreads by subject, and the bars."""
    subjects = [name for name in (*OURS, *PEERS) if any(r["peer"] == name for r in results)]
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
            "measured": None if (m := medians.get("stepwell", {}).get(bar.figure)) is None else m * bar.scale,
            "spread": spreads.get("stepwell", {}).get(bar.figure),
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
    """All tables."""
    console.print(_bars(report))
    medians = report["medians"]
    console.print(_table("Medians", medians, None))
    if medians.get("bare"):
        console.print(_table("Times bare: what the framework costs", medians, "bare"))
    if set(medians) & set(PEERS) and medians.get("stepwell"):
        console.print(_table("Times stepwell: above 1, stepwell takes less", medians, "stepwell"))
    console.print(
        "bare: a hand-written asyncio loop that does the minimum. stepwell: sessions stay warm between turns (the "
        "default). stepwell_cold: every turn loads its session from the store, as the peers do. pydantic_ai_direct: "
        "model requests only, no agent."
    )
    for name, turn in report["growth_stopped_at_turn"].items():
        console.print(f"{name} was stopped at turn {turn} of 1,000: out of time.")
    if report["optional_modules_loaded"]:
        console.print(f"[yellow]import stepwell loads: {', '.join(report['optional_modules_loaded'])}")
    for error in report["errors"]:
        console.print(f"[yellow]{error}", highlight=False)


def _bars(report: dict[str, Any]) -> Table:
    table = Table(title="Bars (stepwell)", title_justify="left")
    for column in ("what", "configuration"):
        table.add_column(column)
    for column in ("bar", "then", "measured", "spread"):
        table.add_column(column, justify="right")
    table.add_column("")
    for bar in report["bars"]:
        measured, unit, verdict = bar["measured"], bar["unit"], _verdict(bar)
        value = "-" if measured is None else f"{_number(measured)} {unit}"
        spread = "" if bar["spread"] is None else f"{bar['spread']:.0%}"
        row = (value, spread, f"[{_COLOURS[verdict]}]{verdict}")
        table.add_row(bar["what"], bar["configuration"], f"{bar['bar']:g} {unit}", f"{bar['then']:g} {unit}", *row)
    return table


_COLOURS = {"not measured": "dim", "above the bar": "red", "bar met": "green", "both met": "bold green"}


def _verdict(bar: dict[str, Any]) -> str:
    measured = bar["measured"]
    if measured is None:
        return "not measured"
    return "above the bar" if measured > bar["bar"] else "bar met" if measured > bar["then"] else "both met"


def _table(title: str, medians: dict[str, dict[str, float]], base: str | None) -> Table:
    header, rows = _matrix(medians, base)
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


def _cell(value: float | None, base: float | None, name: str | None) -> str:
    if value is None or (name is not None and not base):
        return "-"
    return _number(value) if name is None else _number(value / (base or 1)) + "x"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


# --- a page of the documentation --------------------------------------------------------------------------------------

BEGIN = "<!-- measured: begin -->"
END = "<!-- measured: end -->"


def update_page(path: Path, report: dict[str, Any]) -> None:
    """Replace what is between the marks by this report."""
    text = path.read_text(encoding="utf-8")
    head, _, rest = text.partition(BEGIN)
    _, found, tail = rest.partition(END)
    if not found:
        raise SystemExit(f"{path} has no {BEGIN} ... {END}.")
    path.write_text(f"{head}{BEGIN}\n\n{_markdown(report)}\n{END}{tail}", encoding="utf-8")


def _markdown(report: dict[str, Any]) -> str:
    machine, medians = report["machine"], report["medians"]
    versions = ", ".join(f"{name} {text}" for name, text in machine["versions"].items())
    where = f"Python {machine['python']}, {machine['cpu']}, {machine['cores']} cores"
    sections = [
        f"{where}, load {machine['load']:.1f} when it began. {versions}.",
        "### Bars",
        _rows(
            ["", "configuration", "bar", "then", "measured", "spread", ""],
            [
                [
                    bar["what"],
                    bar["configuration"],
                    f"{bar['bar']:g} {bar['unit']}",
                    f"{bar['then']:g} {bar['unit']}",
                    "-" if bar["measured"] is None else f"{_number(bar['measured'])} {bar['unit']}",
                    "-" if bar["spread"] is None else f"{bar['spread']:.0%}",
                    _verdict(bar),
                ]
                for bar in report["bars"]
            ],
            left=(0, 1, 6),
        ),
    ]
    for title, base in (("Medians", None), ("Times bare", "bare"), ("Times Stepwell", "stepwell")):
        if base is None or (medians.get(base) and (base == "bare" or set(medians) & set(PEERS))):
            header, rows = _matrix(medians, base)
            sections += [f"### {title}", _rows(header, rows, left=(0,))]
    return "\n\n".join(sections) + "\n"


def _rows(header: list[str], rows: list[list[str]], left: tuple[int, ...]) -> str:
    marks = ["---" if index in left else "--:" for index in range(len(header))]
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, marks, *rows))
