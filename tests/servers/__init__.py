"""Real servers for tests, benchmarks and developers: each on a free port of this machine, its data in a directory of
its own that goes with it.

In a test, take the fixtures of `tests/conftest.py`. In a script:

    from tests.servers import start_postgres

    with start_postgres() as server:
        run(server.url)

By hand, until Ctrl-C: `python -m tests.servers postgres`.

`stop()` and `start()` again keep the data and the port, for tests of what clients do meanwhile.

A server never outlives the process that started it, however that one ends. One that ends by itself is not started
again: `check()` and leaving its block raise `ServerDied` with the end of its log.
"""

from ._ably import AblyServer, start_ably
from ._node import node
from ._postgres import PostgresServer, start_postgres
from ._process import Server, ServerDied, ServerNotStarted
from ._redis import RedisServer, start_redis
from ._temporal import TemporalServer, start_temporal

__all__ = [
    "AblyServer",
    "PostgresServer",
    "RedisServer",
    "Server",
    "ServerDied",
    "ServerNotStarted",
    "TemporalServer",
    "node",
    "start_ably",
    "start_postgres",
    "start_redis",
    "start_temporal",
]
