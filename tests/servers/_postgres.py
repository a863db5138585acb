"""PostgreSQL: a cluster of its own."""

from __future__ import annotations

import contextlib
import itertools
import os
import pwd
import shutil
import signal
import subprocess
from collections.abc import Generator
from pathlib import Path

import psycopg
from psycopg import sql

from ._process import Server, ServerNotStarted, data_directory, find, on_free_port

FAST = {"fsync": "off", "synchronous_commit": "off", "full_page_writes": "off"}
EMPTY = (
    """
    SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity
    WHERE datname = current_database() AND pid <> pg_backend_pid()
    """,
    """
    DO $$
    DECLARE name text;
    BEGIN
        FOR name IN SELECT nspname FROM pg_namespace WHERE nspname !~ '^pg_' AND nspname <> 'information_schema' LOOP
            EXECUTE format('DROP SCHEMA %I CASCADE', name);
        END LOOP;
        CREATE SCHEMA public AUTHORIZATION pg_database_owner;
        GRANT USAGE ON SCHEMA public TO public;
        EXECUTE format('ALTER DATABASE %I RESET ALL', current_database());
    END $$
    """,
)


class PostgresServer(Server):
    """A cluster whose only user is `postgres`, without a password, over TCP.

    Attributes:
        fast: A crash, even of the server alone, may lose what was committed just before.
    """

    name = "PostgreSQL"
    ends_by = signal.SIGINT  # fast shutdown; SIGTERM would wait for clients

    def __init__(self, port: int, *, fast: bool, settings: dict[str, str]) -> None:
        self.fast = fast
        self._numbers = itertools.count(1)
        self._admin: psycopg.Connection | None = None
        self._free: list[str] = []
        program = find("postgres", "usr/lib/postgresql/*/bin/postgres")
        directory = data_directory("postgres")
        user = None
        if os.geteuid() == 0:  # which it refuses to run as
            user = "postgres"
            try:
                owner = pwd.getpwnam(user)
            except KeyError:
                shutil.rmtree(directory)
                raise ServerNotStarted("PostgreSQL does not run as root, and there is no user postgres") from None
            os.chown(directory, owner.pw_uid, owner.pw_gid)
        _initdb(directory / "data", user)
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": str(port),
            "unix_socket_directories": "",
            "max_connections": "200",
            "timezone": "UTC",
            "log_timezone": "UTC",
            **(FAST if fast else {}),
            **settings,
        }
        super().__init__(
            [
                *(program, "-D", str(directory / "data")),
                *(part for name, value in settings.items() for part in ("-c", f"{name}={value}")),
            ],
            port=port,
            directory=directory,
            ready="database system is ready to accept connections",
            user=user,
        )

    @property
    def url(self) -> str:
        """Of its database `postgres`."""
        return self.database_url("postgres")

    def database_url(self, database: str) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/{database}"

    @contextlib.contextmanager
    def database(self) -> Generator[str]:
        """The URL of an empty database of one's own; at its end the connections to it that are left are cut off.

        A database and no schema: names of LISTEN and of advisory locks are its own too. It is emptied and used again,
        which takes 5 ms, where making one and dropping it takes 17, and many times that when the disk is busy.

        Raises:
            ServerDied: The server ended by itself, before or meanwhile.
        """
        self.check()
        name = self._free.pop() if self._free else self._create_database()
        try:
            yield self.database_url(name)
        finally:
            self.check()
            with psycopg.connect(self.database_url(name), autocommit=True) as connection:
                for statement in EMPTY:
                    connection.execute(statement)
            self._free.append(name)

    def _create_database(self) -> str:
        name = f"test_{next(self._numbers)}"
        strategy = "file_copy" if self.fast else "wal_log"  # copying files wants a checkpoint, dear unless fsync is off
        self._do(f"CREATE DATABASE {name} TEMPLATE template0 STRATEGY {strategy}")
        return name

    def stop(self, how: signal.Signals | None = None) -> None:
        if self._admin is not None:
            self._admin.close()
        super().stop(how)

    def _do(self, statement: str) -> None:
        if self._admin is None or self._admin.closed:
            self._admin = psycopg.connect(self.url, autocommit=True)
        self._admin.execute(sql.SQL(statement))


def start_postgres(*, fast: bool = False, **settings: str) -> PostgresServer:
    """Start PostgreSQL, as the user `postgres` when this process is root's.

    Args:
        fast: Never wait for the disk: a crash may lose what was committed. For tests that crash only clients;
            benchmarks want the honest one.
        **settings: As in postgresql.conf.

    Raises:
        ServerNotStarted: It did not come up, with the reason.
    """
    return on_free_port(lambda port: PostgresServer(port, fast=fast, settings=settings))


def _initdb(data: Path, user: str | None) -> None:
    command = [
        *(find("initdb", "usr/lib/postgresql/*/bin/initdb"), "--pgdata", str(data), "--username", "postgres"),
        *("--auth", "trust", "--locale", "C", "--encoding", "UTF8", "--no-sync", "--no-instructions"),
    ]
    identity = {} if user is None else {"user": user, "group": user, "extra_groups": []}
    done = subprocess.run(command, cwd=data.parent, capture_output=True, text=True, check=False, **identity)
    if done.returncode:
        shutil.rmtree(data.parent, ignore_errors=True)
        raise ServerNotStarted(f"initdb exited with {done.returncode}: {' '.join(command)}\n{done.stdout}{done.stderr}")
