"""Set up environments and run every measurement in a process of its own."""

from __future__ import annotations

import json
import os
import platform
import sqlite3
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console

from bench.backends import Backends
from bench.channels import BENCHES as CHANNEL_MEASUREMENTS
from bench.progress import progress_of

HERE = Path(__file__).parent
HARNESS = HERE / "peers"
VENVS = HARNESS / "venvs"

PEERS = {
    # name: environment, distribution
    "burr": ("burr", "apache-burr"),
    "agno": ("agno", "agno"),
    "langgraph": ("langgraph", "langgraph"),
    "openai_agents": ("oaiagents", "openai-agents"),
    "llama_index_workflows": ("liw", "llama-index-workflows"),
    "pydantic_ai": ("pai", "pydantic-ai-slim"),
    "pydantic_ai_direct": ("pai", "pydantic-ai-slim"),
    "google_adk": ("adk", "google-adk"),
    "dbos": ("dbos", "dbos"),
}
OURS: dict[str, dict[str, str]] = {"bare": {}, "stepwell": {}, "stepwell_cold": {"STEPWELL_WARM": "0"}}
"""What runs in this environment; the same adapter may run in several configurations."""

BENCHES = ("import", "one_turn", "conv3", "stream", "persist", "growth", "resume", "fanout", "alloc")
CHANNEL_BENCHES = tuple(CHANNEL_MEASUREMENTS)
DEFAULT_BENCHES = ("import", "one_turn", "conv3", "stream", "persist", "growth", "resume", *CHANNEL_BENCHES)
ONCE = ("growth", "alloc")
"""Measured once for peers: a thousand turns take minutes there."""

OWN = ("import", "resume")
"""Measured of nobody else."""

COLD_MATTERS = ("persist", "growth")
OPTIONAL = ("pydantic_ai", "openai", "anthropic", "google.genai", "langchain_core", "starlette", "uvicorn", "psycopg")
IMPORT_RUNS = 15

Result = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """What to measure."""

    peers: list[str]
    benches: list[str]
    runs: int
    backends: Backends

    @property
    def steps(self) -> list[tuple[int, str, str]]:
        """Run, benchmark, subject; subjects interleaved, so that a busy minute does not hit one of them alone."""
        return [
            (run, bench, subject)
            for run in range(self.runs)
            for bench in self.benches
            for subject in (self.backends.names if bench in CHANNEL_BENCHES else (*OURS, *self.peers))
            if not (subject == "stepwell_cold" and bench not in COLD_MATTERS)
            and not (bench in OWN and subject != "stepwell")
            and not (run and bench in ONCE and subject in PEERS)
            and not (bench == "turn_bytes" and subject != "sqlite")
        ]


def set_up(peers: list[str], console: Console) -> list[str]:
    """Make the environments that are missing; returns the peers that have one."""
    environments = {PEERS[peer][0] for peer in peers}
    missing = sorted(name for name in environments if not (VENVS / name / "ready").exists())
    if missing:
        console.print(f"Setting up the environments of peers: {', '.join(missing)}. This downloads up to 1 GB.")
        subprocess.run(["sh", str(HERE / "setup.sh"), *missing], check=False)
    ready = [peer for peer in peers if (VENVS / PEERS[peer][0] / "ready").exists()]
    for peer in peers:
        if peer not in ready:
            console.print(f"[yellow]{peer} is left out: its environment could not be set up.")
    return ready


def describe(peers: list[str]) -> Result:
    """The machine and the versions, for the head of the report."""
    versions = {"stepwell": version("stepwell")}
    for peer in peers:
        environment, distribution = PEERS[peer]
        code = f"from importlib.metadata import version; print(version({distribution!r}))"
        versions[peer] = _output([_python(environment), "-c", code]) or "?"
    cores = os.cpu_count() or 1
    load = os.getloadavg()[0]
    parts = [f"Python {platform.python_version()}", f"SQLite {sqlite3.sqlite_version}", _cpu(), f"{cores} cores"]
    text = f"{', '.join(parts)}, load {load:.1f}; " + ", ".join(f"{name} {text}" for name, text in versions.items())
    if load > 0.5:
        text += "\n[yellow]The machine is busy with something else: times will be too high, and differ between runs."
    return {
        "python": platform.python_version(),
        "cpu": _cpu(),
        "cores": cores,
        "load": load,
        "versions": versions,
        "text": text,
    }


def measure(plan: Plan, console: Console) -> list[Result]:
    """Every step of the plan, one JSON object each; an error is a result too."""
    results: list[Result] = []
    with progress_of(console) as progress:
        task = progress.add_task("", total=len(plan.steps))
        for run, bench, subject in plan.steps:
            progress.update(task, description=f"run {run + 1}: {bench}, {subject}")
            began = time.perf_counter()
            if bench in CHANNEL_BENCHES:
                with plan.backends.fresh(subject) as url:
                    result = _run([sys.executable, "-m", "bench.channels", bench, url], HERE.parent, {})
            else:
                result = _imports() if bench == "import" else _harness(subject, bench)
            result.update(peer=subject, bench=bench, run=run, took=round(time.perf_counter() - began, 1))
            results.append(result)
            if not console.is_terminal or "error" in result:
                console.print(f"run {run + 1}: {bench:9} {subject:22} {_short(result)}", highlight=False)
            progress.advance(task)
    return results


def _harness(subject: str, bench: str) -> Result:
    python = sys.executable if subject in OURS else _python(PEERS[subject][0])
    adapter = "stepwell" if subject.startswith("stepwell") else subject
    return _run([python, str(HARNESS / "harness.py"), adapter, bench], HARNESS, OURS.get(subject, {}))


def _run(command: list[str], directory: Path, more: dict[str, str]) -> Result:
    """The last object that a process prints."""
    env = {**os.environ, **more, "OTEL_SDK_DISABLED": "true", "LANGSMITH_TRACING": "false"}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    try:
        done = subprocess.run(command, env=env, cwd=directory, capture_output=True, text=True, timeout=300, check=False)
    except subprocess.TimeoutExpired:
        return {"error": "took more than 300 s"}
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if lines:
        return json.loads(lines[-1])
    return {"error": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1][:300]}


def _imports() -> Result:
    """Seconds that `import stepwell` takes in a fresh process, byte code and file cache warm."""
    code = (
        "import sys, time; began = time.perf_counter(); import stepwell; took = time.perf_counter() - began; "
        f"print(took, *[name for name in {OPTIONAL!r} if name in sys.modules])"
    )
    times: list[float] = []
    optional: list[str] = []
    for index in range(IMPORT_RUNS + 1):
        words = _output([sys.executable, "-c", code]).split()
        if not words:
            return {"error": "import stepwell fails"}
        if index:  # the first one may have compiled
            times.append(float(words[0]))
            optional = words[1:]
    times.sort()
    return {"import_ms": round(times[len(times) // 2] * 1000, 1), "n": len(times), "optional": optional}


def _python(environment: str) -> str:
    return str(VENVS / environment / "bin" / "python")


def _output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _short(result: Result) -> str:
    keys = (
        *("error", "missing", "import_ms", "per_token_net_us", "p50_us", "bytes_per_session", "turn_us", "stored"),
        *("appends_1", "appends_50", "latency_p50_ms", "latency_p99_ms", "stored_us", "view_us", "view_each_us"),
        *("join_ms", "first_ms", "client_kb", "agent_kb", "turn_bytes"),
    )
    return ", ".join(f"{key} {result[key]}" for key in keys if key in result)
