"""The servers of the tests: up, apart, reported when they die, gone with the process that started them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest
import redis
from temporalio.client import Client

from servers import PostgresServer, RedisServer, ServerDied, ServerNotStarted, start_postgres, start_redis

RIGHTS = "SELECT nspowner::regrole::text, nspacl::text FROM pg_namespace WHERE nspname = 'public'"
ROOT = Path(__file__).parents[2]


def test_postgres_gives_every_test_an_empty_database(postgres_server: PostgresServer, postgres_url: str) -> None:
    with postgres_server.database() as one, postgres_server.database() as other:
        assert len({one, other, postgres_url}) == 3
        with psycopg.connect(one) as connection:
            connection.execute("CREATE TABLE t (i int)")
            connection.execute("CREATE SCHEMA s CREATE TABLE t (i serial)")
            rights = connection.execute(RIGHTS).fetchall()
        with psycopg.connect(other) as connection:
            assert connection.execute("SELECT to_regclass('t')").fetchone() == (None,)
        left_open = psycopg.connect(one)
        left_open.execute("LOCK TABLE t")
    with pytest.raises(psycopg.OperationalError):
        left_open.execute("SELECT 1")
    left_open.close()
    with postgres_server.database() as again, psycopg.connect(again) as connection:
        assert connection.execute("SELECT to_regclass('t'), to_regclass('s.t')").fetchone() == (None, None)
        assert connection.execute(RIGHTS).fetchall() == rights
        connection.execute("CREATE TABLE t (i int)")
        assert connection.execute("SHOW fsync").fetchone() == ("off",)
        assert connection.execute("SHOW max_connections").fetchone() == ("200",)


def test_an_honest_postgres_waits_for_the_disk_and_takes_settings() -> None:
    with start_postgres(work_mem="5MB") as server, psycopg.connect(server.url) as connection:
        assert connection.execute("SHOW fsync").fetchone() == ("on",)
        assert connection.execute("SHOW synchronous_commit").fetchone() == ("on",)
        assert connection.execute("SHOW work_mem").fetchone() == ("5MB",)
        with server.database() as url:
            assert url != server.url


def test_redis_gives_every_test_an_empty_database(redis_server: RedisServer, redis_url: str) -> None:
    with redis_server.database() as one, redis_server.database() as other:
        assert len({one, other, redis_url}) == 3
        with redis.Redis.from_url(one) as client:
            client.set("k", "v")
        with redis.Redis.from_url(other) as client:
            assert client.get("k") is None
            assert client.config_get("appendonly") == {"appendonly": "no"}


def test_redis_keeps_a_file_when_asked_to() -> None:
    with start_redis(appendonly=True, appendfsync="always") as server, redis.Redis.from_url(server.url) as client:
        assert client.config_get("append*") == {
            **client.config_get("append*"),
            "appendonly": "yes",
            "appendfsync": "always",
        }


@pytest.mark.anyio
async def test_temporal_answers(temporal_address: str) -> None:
    client = await Client.connect(temporal_address)
    assert await client.count_workflows() is not None


@pytest.mark.parametrize("how", [None, signal.SIGKILL])
def test_redis_stopped_and_started_again_has_its_data(how: signal.Signals | None) -> None:
    with start_redis(appendonly=True, appendfsync="always") as server, redis.Redis.from_url(server.url) as client:
        client.set("k", "v")
        server.stop(how)
        with pytest.raises(redis.ConnectionError):
            client.get("k")
        server.stop()
        server.check()
        server.start()
        server.start()
        assert client.get("k") == b"v"


@pytest.mark.parametrize("how", [None, signal.SIGQUIT])
def test_postgres_stopped_and_started_again_has_its_data(how: signal.Signals | None) -> None:
    with start_postgres(fast=how is None) as server, server.database() as url:
        with psycopg.connect(url) as connection:
            connection.execute("CREATE TABLE t (i int)")
        server.stop(how)
        with pytest.raises(psycopg.OperationalError):
            psycopg.connect(url)
        server.start()
        with psycopg.connect(url) as connection:
            assert connection.execute("SELECT count(*) FROM t").fetchone() == (0,)


def test_a_server_that_dies_is_reported_and_not_started_again() -> None:
    server = start_redis()
    os.kill(server.pid, signal.SIGKILL)
    server.wait()
    with pytest.raises(ServerDied), server.database():
        pass
    with pytest.raises(ServerDied, match=r"(?s)Redis \(port \d+\) ended by itself with -9\n.*Ready to accept"), server:
        pass
    assert not server.directory.exists()


def test_a_server_that_does_not_start_says_why() -> None:
    with pytest.raises(ServerNotStarted, match=r"(?s)exited with 1.*Bad directive"):
        start_redis("--no-such-option", "yes")


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks at processes through /proc")
def test_a_server_goes_with_the_process_that_started_it() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.servers", "redis"], stdout=subprocess.PIPE, cwd=ROOT, text=True
    )
    with process:
        assert process.stdout is not None
        said = json.loads(process.stdout.readline())
        with redis.Redis.from_url(said["url"]) as client:
            assert client.ping()
            # Blocks until the server is gone.
            pubsub = client.pubsub()
            pubsub.subscribe("c")
            process.kill()
            pubsub.get_message(timeout=None)  # that it has subscribed
            with pytest.raises(redis.ConnectionError):
                pubsub.get_message(timeout=None)


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
def test_by_hand_until_ctrl_c(ending: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.servers", "postgres", "--fast"], stdout=subprocess.PIPE, cwd=ROOT, text=True
    )
    with process:
        assert process.stdout is not None
        said = json.loads(process.stdout.readline())
        with psycopg.connect(said["url"]) as connection:
            assert connection.execute("SELECT 1").fetchone() == (1,)
        process.send_signal(ending)
        assert process.wait(20) == 0
    with pytest.raises(psycopg.OperationalError):
        psycopg.connect(said["url"])


def test_nothing_is_installed_when_both_are_there() -> None:
    bash = shutil.which("bash")
    assert bash
    done = subprocess.run([bash, ROOT / "tests/servers/install.sh"], capture_output=True, text=True, check=True)
    assert done.stdout == done.stderr == ""
