"""The unmodified JavaScript SDK does what the stored traces say: drift in its packages is noticed here."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from servers import node
from wire.replay import TRACES


def run(*command: str) -> str:
    done = subprocess.run(node(*command), capture_output=True, text=True, check=False, timeout=50)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_scenarios_give_the_stored_traces(tmp_path: Path) -> None:
    said = run("run.mjs", "fake", "--out", str(tmp_path))
    assert said.endswith("\n154 passed, 0 failed\n")
    stored = {path.name: path.read_bytes() for path in TRACES.glob("golden-*.json")}
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == stored
    assert len(stored) == 19


def test_the_scenarios_hold_with_the_real_client_over_the_endpoint() -> None:
    assert run("run.mjs", "ws").endswith("\n75 passed, 0 failed\n")


def test_the_client_reads_hand_made_messages_as_stored(tmp_path: Path) -> None:
    run("probes.mjs", str(tmp_path / "probes.json"))
    assert (tmp_path / "probes.json").read_bytes() == (TRACES / "probes.json").read_bytes()


def test_the_real_client_survives_lost_sockets_on_the_endpoint() -> None:
    seen = json.loads(run("resume.mjs"))
    assert seen["viewer_resume"]["text"] == "hi|one two three "
    assert seen["viewer_resume"]["states"][-3:] == ["disconnected", "connecting", "connected"]
    assert seen["agent_resume"]["text"] == "hi|one two three four five"
    assert seen["agent_resume"]["runs"] == ["complete"]
    assert seen["agent_resume"]["viewerErrors"] == seen["agent_resume"]["agentErrors"] == []
    assert seen["token"] == {"connectedAs": "tok-user", "history": ["user", "assistant"]}
    assert seen["lostConnectionKeptLog"]["sawGapRun"]
