"""Who uses a database, what its tables are called and which errors it speaks in; and the version of its tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, LiteralString

import psycopg
from psycopg import sql

from stepwell.errors import NewerSchemaError, StepwellError

__all__ = ["OLDEST_SERVER", "Part", "migrate"]

OLDEST_SERVER: Final = 13
"""Major version of PostgreSQL."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """The tables of one user of the database.

    Attributes:
        name: Its tables' names begin with `stepwell_` and this.
        whole: What it is called in sentences: "the session store".
        pointer: Where its URL was given, for errors.
        lock: Advisory lock of those who change its tables.
        migrations: SQL scripts; the n-th brings version n to n + 1. Functions are never replaced but get another
            number: while machines are updated one after the other, the older ones go on calling theirs.
        error: What cannot be done.
        busy: What cannot be done now.
        data: What cannot be read.
        closed: What is said after the end.
    """

    name: str
    whole: str
    pointer: str
    lock: int
    migrations: Sequence[Sequence[LiteralString]]
    error: Callable[[str], StepwellError]
    busy: Callable[[str], StepwellError]
    data: Callable[[str], StepwellError]
    closed: Callable[[], StepwellError]


async def migrate(connection: psycopg.AsyncConnection[Any], part: Part) -> None:
    """Bring the tables up to date; several processes may try at once. Where it fails, the connection is to be closed.

    Raises:
        NewerSchemaError: They are ahead of this Stepwell.
        StepwellError: The server is too old; the part's `error`.
        psycopg.Error: It failed, and nothing was changed.
    """
    if connection.info.server_version < OLDEST_SERVER * 10_000:
        raise part.error(f"PostgreSQL {OLDEST_SERVER} or newer is needed for {part.whole}: update the server.")
    newest = len(part.migrations)
    table = sql.Identifier(f"stepwell_{part.name}_schema")
    if await _version(connection, part, table) == newest:
        return
    # Not inside the transaction: one that began before another's commit does not find the tables.
    await connection.execute("SELECT pg_advisory_lock(%s)", (part.lock,))
    async with connection.transaction():
        version = await _version(connection, part, table)  # another process may have been first
        for script in part.migrations[version:]:
            for statements in script:
                await connection.execute(statements, prepare=False)
        if version == 0:
            await connection.execute(sql.SQL("CREATE TABLE {} (version integer NOT NULL)").format(table))
            await connection.execute(sql.SQL("INSERT INTO {} VALUES (0)").format(table))
        await connection.execute(sql.SQL("UPDATE {} SET version = %s").format(table), (newest,))
    await connection.execute("SELECT pg_advisory_unlock(%s)", (part.lock,))


async def _version(connection: psycopg.AsyncConnection[Any], part: Part, table: sql.Identifier) -> int:
    name = f"stepwell_{part.name}_schema"
    found = await (await connection.execute("SELECT to_regclass(%s) IS NOT NULL", (name,))).fetchone()
    if found is None or not found[0]:
        return 0
    found = await (await connection.execute(sql.SQL("SELECT version FROM {}").format(table))).fetchone()
    version = 0 if found is None else int(found[0])
    newest = len(part.migrations)
    if version > newest:
        raise NewerSchemaError(
            f"The {part.name} tables in PostgreSQL have version {version}, this Stepwell knows up to {newest}: "
            "update Stepwell."
        )
    return version
