"""Run a server until Ctrl-C: `python -m tests.servers postgres` prints its URL as a line of JSON."""

from __future__ import annotations

import argparse
import json
import signal

from . import Server, start_postgres, start_redis, start_temporal


def _start(options: argparse.Namespace) -> Server:
    if options.server == "postgres":
        return start_postgres(fast=options.fast)
    if options.server == "redis":
        return start_redis(appendonly=options.appendonly)
    return start_temporal()


def main() -> None:
    """Start, print, wait."""
    parser = argparse.ArgumentParser(prog="python -m tests.servers", description=__doc__)
    servers = parser.add_subparsers(dest="server", required=True)
    servers.add_parser("postgres").add_argument("--fast", action="store_true", help="never wait for the disk")
    servers.add_parser("redis").add_argument("--appendonly", action="store_true", help="keep the append-only file")
    servers.add_parser("temporal")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with _start(options) as server:
        try:
            print(json.dumps({"server": options.server, "url": server.url, "pid": server.pid}), flush=True)
            server.wait()
        except KeyboardInterrupt:
            pass


if __name__ == "__main__":
    main()
