"""Real servers on real sockets: connections that are lost, graceful stops, restarts."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from server.kit import FLOWS, Event, Process, application, events_of, listening, until, until_event
from stepwell import Engine
from stepwell.server import create_app
from stepwell.testing import Reply, ScriptedModel

pytestmark = pytest.mark.anyio

TURNS = "/v1/flows/TalkFlow/turns"


def raw_post(path: str, body: Any, **headers: str) -> bytes:
    data = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, f"Content-Length: {len(data)}", "", ""]).encode() + data


async def test_a_connection_that_is_lost_does_not_cancel_the_turn() -> None:
    gate = anyio.Event()
    model = ScriptedModel(["One.", Reply.text("Two.").gated(gate)])
    app = application(model)
    async with listening(app) as server, httpx.AsyncClient(base_url=server.url) as client:
        session = (await client.post(TURNS, json={"message": "hello"})).json()["session_id"]
        body = {"message": "and?", "session_id": session}
        port = int(server.url.rpartition(":")[2])
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(raw_post(TURNS, body, Idempotency_Key="k"))
        await until(lambda: model.open)
        before = len(server.server_state.connections)
        writer.transport.abort()
        await until(lambda: len(server.server_state.connections) < before)
        # The server knows by now that the caller is gone.
        assert model.open == 1
        gate.set()
        again = (await client.post(TURNS, json=body, headers={"Idempotency-Key": "k"})).json()
        assert again["message"] == "Two."
        assert not model.cancelled
    model.assert_done()


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_body_of_5_mb_is_refused_and_the_client_reads_why(chunked: bool) -> None:
    async def chunks() -> Any:
        for _ in range(50):
            yield b"x" * 100_000

    async with listening(application(ScriptedModel())) as server, httpx.AsyncClient(base_url=server.url) as client:
        content: Any = chunks() if chunked else b"x" * 5_000_000
        answer = await client.post(TURNS, content=content, headers={"Content-Type": "application/json"})
        assert (answer.status_code, answer.json()["code"]) == (413, "input_too_large")
        assert ("transfer-encoding" in answer.request.headers) == chunked
        assert (await client.get("/healthz")).status_code == 200


async def test_half_a_body_does_not_hold_up_a_stop() -> None:
    app = application(ScriptedModel())
    async with listening(app, grace=0.0) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
        writer.write(raw_post(TURNS, {"message": "hello"})[:-5])
        await until(lambda: app._reads)
        server.should_exit = True
        answer = await reader.read()
        assert answer.startswith(b"HTTP/1.1 503")
        assert b'"code":"engine_closed"' in answer
        writer.close()


async def test_a_stop_lets_turns_finish() -> None:
    gate = anyio.Event()
    model = ScriptedModel([Reply.text("Done.").gated(gate)])
    app = application(model)
    async with listening(app) as server, httpx.AsyncClient(base_url=server.url) as client:
        running = asyncio.create_task(client.post(TURNS, json={"message": "hello"}))
        await until(lambda: model.open)
        server.should_exit = True
        await until(lambda: not app.accepting)
        with pytest.raises(httpx.ConnectError):
            async with httpx.AsyncClient(base_url=server.url) as late:
                await late.get("/healthz")
        assert not running.done()
        gate.set()
        assert (await running).json()["message"] == "Done."


async def test_a_stop_leaves_what_is_open_after_the_grace_for_recovery(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/s.db"
    model = ScriptedModel([Reply.text("never").stalling()])
    key = {"Idempotency-Key": "k"}
    async with listening(application(model, store=store), grace=0.05) as server:
        async with httpx.AsyncClient(base_url=server.url) as client:
            running = asyncio.create_task(client.post(TURNS, json={"message": "hello"}, headers=key))
            await model.wait_stalled()
            server.should_exit = True
            answer = await running
            assert (answer.status_code, answer.json()["code"]) == (503, "turn_cancelled")
            assert answer.json()["retryable"]
            assert answer.headers["retry-after"] == "5"
            session = answer.json()["session_id"]
    model = ScriptedModel(["Hello, at last."])
    async with listening(application(model, store=store)) as server:
        async with httpx.AsyncClient(base_url=server.url) as client:
            again = await client.post(TURNS, json={"message": "hello"}, headers=key)
            assert (again.json()["message"], again.json()["session_id"]) == ("Hello, at last.", session)
            rows = (await client.get(f"/v1/sessions/{session}")).json()["messages"]["Talk"]
            assert [row["role"] for _, row in rows] == ["user", "assistant"]
    model.assert_done()


async def test_an_engine_of_somebody_else_goes_on() -> None:
    gate = anyio.Event()
    model = ScriptedModel([Reply.text("Done.").gated(gate)])
    async with Engine(FLOWS, models={"scripted": model}) as engine:
        app = create_app(engine)
        async with listening(app, grace=0.05) as server, httpx.AsyncClient(base_url=server.url) as client:
            running = asyncio.create_task(
                client.post(TURNS, json={"message": "hello"}, headers={"Idempotency-Key": "k"})
            )
            await until(lambda: model.open)
            server.should_exit = True
            answer = await running
            assert (answer.status_code, answer.json()["code"]) == (503, "engine_closed")
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            late = await client.post(TURNS, json={"message": "too late"})
            assert (late.status_code, late.json()["code"]) == (503, "engine_closed")
            assert len(model.requests) == 1
        gate.set()
        result = await engine.run("TalkFlow", "hello", idempotency_key="-:k")
        assert result.message == "Done."


async def test_the_url_of_an_ipv6_server() -> None:
    from stepwell.server._serve import Server, listen

    try:
        opened = listen("::1", 0)
    except Exception:  # noqa: BLE001 - a machine without IPv6: the form of the URL is all there is to see
        opened = socket.socket(socket.AF_INET6) if socket.has_ipv6 else socket.socket()
    with opened:
        server = Server(application(ScriptedModel()), opened, "::1")
        assert server.url.startswith("http://[::1]:")


# -- processes

STALLING = """
import sys
from server.kit import FLOWS
from stepwell.server import serve
from stepwell.testing import Reply, ScriptedModel
model = ScriptedModel(default=Reply.text("never").stalling())
grace = float(sys.argv[1])
serve(flows=FLOWS, models={"scripted": model}, port=0, grace=grace, ready=lambda url: print(url, flush=True))
print("closed")
"""

FOLLOWED = """
import sys
from server.kit import FLOWS
from stepwell.server import serve
from stepwell.testing import Reply, ScriptedModel
store, channels, words, grace = sys.argv[1:5]
reply = Reply.text([words, " lost"]).stalling(after=1) if float(grace) < 10 else Reply.text(["Hel", "lo."])
serve(
    flows=FLOWS, models={"scripted": ScriptedModel(default=reply)}, store=store, channels=channels, port=0,
    grace=float(grace), ready=lambda url: print(url, flush=True), lease_ttl=2.0, recovery_interval=0.1,
)
"""

HOTEL = """
import sys
sys.path.insert(0, sys.argv[2])
from hotel import HotelFlow
from stepwell.models.offline import OfflineModel
from stepwell.server import serve
serve(
    flows=[HotelFlow], models={"offline": OfflineModel()}, store=sys.argv[1], port=0,
    ready=lambda url: print(url, flush=True),
)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_an_idle_server_with_exit_code_0(number: signal.Signals) -> None:
    with Process(STALLING, "20") as server:
        assert server.curl("/healthz") == (200, {"status": "ok"})
        code, output = server.stop(number)
        assert (code, output) == (0, "closed\n")


def hanging(server: Process) -> socket.socket:
    """A turn under way in a server, on a connection of its own."""
    connection = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])))
    connection.sendall(raw_post(TURNS, {"message": "hello"}))
    while not server.curl("/v1/sessions")[1]["sessions"]:
        pass
    return connection


def test_a_signal_answers_the_turn_that_is_open_after_the_grace() -> None:
    with Process(STALLING, "0.2") as server, hanging(server) as connection:
        code, output = server.stop()
        assert code == 0, output
        assert output.startswith("closed\n")
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
        assert answer.startswith(b"HTTP/1.1 503")
        assert b'"code":"turn_cancelled"' in answer


def test_a_second_signal_does_not_wait() -> None:
    with Process(STALLING, "3600") as server, hanging(server):
        server.process.send_signal(signal.SIGTERM)
        # It does not accept any more: the first signal has arrived.
        port = int(server.url.rpartition(":")[2])
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
            except OSError:
                break
        code, output = server.stop(signal.SIGINT)
        assert code == 0, output


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("places", ["sqlite", "postgres and redis"])
async def test_scenario_a_server_is_told_to_stop_in_a_turn_and_another_one_finishes_it(
    places: str, end: signal.Signals, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if places == "sqlite":
        store = channels = f"sqlite:///{tmp_path}/s.db"
    else:
        store, channels = (request.getfixturevalue(name) for name in ("postgres_database", "redis_database"))
    key = {"Idempotency-Key": "k"}

    def said(events: list[Event]) -> list[str]:
        return [str(event["data"].get("data", "")) for event in events if event["event"] == "message"]

    with Process(FOLLOWED, store, channels, "Dead", "0.2") as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
            stream = {"Accept": "text/event-stream", **key}
            async with client.stream("POST", TURNS, json={"message": "hello"}, headers=stream) as answer:
                told = events_of(answer)
                session = (await anext(told))["data"]["session_id"]
                events = f"/v1/sessions/{session}/events"
                async with client.stream("GET", events + "?history=1") as response:
                    watched = events_of(response)
                    seen = await until_event(watched, lambda event: "Dead" in str(event["data"].get("data")))
                    server.process.send_signal(end)
                    if end == signal.SIGTERM:
                        seen += [event async for event in watched]
                        [*_, last] = [event async for event in told]
                        assert (last["event"], last["data"]["code"]) == ("error", "turn_cancelled")
                        assert last["data"]["retryable"]
        assert server.process.wait(30) == (0 if end == signal.SIGTERM else -end)
    cursor = [event["id"] for event in seen if "id" in event][-1]
    assert "ai-run-end" not in [event["data"].get("name") for event in seen]
    # Nobody asks: the second server finds the turn by itself, and whoever watched goes on from the cursor.
    with Process(FOLLOWED, store, channels, "-", "20") as server:
        async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
            async with client.stream("GET", events, headers={"Last-Event-ID": cursor}) as response:
                rest = await until_event(events_of(response), lambda event: event["data"].get("name") == "ai-run-end")
            again = (await client.post(TURNS, json={"message": "hello"}, headers=key)).json()
            assert (again["message"], again["session_id"]) == ("Hello.", session)
            async with client.stream("GET", events + "?view=1") as response:
                view = (await anext(events_of(response)))["data"]
            metrics = (await client.get("/metrics")).text
        assert server.stop()[0] == 0
    shown = ["".join(part.get("text", "") for part in one["message"]["parts"]) for one in view["messages"]]
    assert shown == ["hello", "Hello."]
    assert [run["status"] for run in view["runs"]] == ["complete"]
    assert "".join(said(rest)).count("Hello.") == 1
    assert rest[-1]["data"]["extras"]["ai"]["transport"]["run-reason"] == "complete"
    assert 'stepwell_recoveries_total{flow="TalkFlow"} 1.0' in metrics


def test_scenario_the_same_conversation_over_http_resumed_after_restarts(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "hotel"
    lines = (example / "conversation.txt").read_text(encoding="utf-8").splitlines()
    session: str | None = None
    stages: list[str] = []
    run = -(-len(lines) // 4)
    for start in range(0, len(lines), run):  # four servers, one after the other
        with Process(HOTEL, f"sqlite:///{tmp_path}/s.db", str(example)) as server:
            for line in lines[start : start + run]:
                body = {"message": line, "session_id": session} if session else {"message": line}
                if session is None:
                    body["config"] = {"today": "2026-12-01"}  # type: ignore[assignment]
                status, result = server.curl("/v1/flows/HotelFlow/turns", body)
                assert (status, result["success"]) == (200, True), result
                session = result["session_id"]
                stages.append(result["current"])
            assert server.stop()[0] == 0
    assert len(stages) == 14
    assert result["completed"]
    assert "Goodbye" in result["message"]
    assert stages[0] == "ExploreStep"
    assert "BookStep" in stages


def test_the_older_contract_resumes_after_a_restart_too(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "hotel"
    session = ""
    for line in ("hello", "to Lisbon please"):
        with Process(HOTEL, f"sqlite:///{tmp_path}/s.db", str(example)) as server:
            headers = [f"CHAT_SESSION_ID: {session}"] if session else []
            status, envelope = server.curl("/ai/run", {"flowName": "HotelFlow", "message": line}, *headers)
            assert (status, envelope["success"]) == (200, True)
            assert not session or envelope["session"] == session
            session = envelope["session"]
    assert "Lisbon" in envelope["message"]
