"""An endpoint that the clients of Ably accept: one app, JSON only; see `tests/node/harness/mini-ably-server.mjs`."""

from __future__ import annotations

import json
import urllib.parse
import urllib.request
from typing import Any

from ._node import node
from ._process import Server, data_directory


class AblyServer(Server):
    """The endpoint.

    Attributes:
        key: Of the app.
    """

    name = "Ably's endpoint"
    key = "app.key1:secretsecretsecret"

    def __init__(self) -> None:
        command = node("mini-ably-server.mjs", "0")
        super().__init__(
            command,
            port=0,
            directory=data_directory("ably"),
            ready=r'^\{"port":(?P<port>\d+)',
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def token(self, client_id: str = "*") -> str:
        """A token for a client id; `*` allows any."""
        return self._get("token", clientId=client_id)["token"]

    def realtime_options(self) -> dict[str, Any]:
        """For `ably.AblyRealtime`, besides the client id: it adds no port to its host, so the host brings it along."""
        return {"key": self.key, "endpoint": f"127.0.0.1:{self.port}", "tls": False, "use_binary_protocol": False}

    def rest_options(self, client_id: str = "*") -> dict[str, Any]:
        """For `ably.AblyRest`, which takes no key without TLS. `AblyRealtime` cannot do both: its `history` fails."""
        return {
            "token": self.token(client_id),
            "endpoint": "127.0.0.1",
            "port": self.port,
            "tls": False,
            "use_binary_protocol": False,
        }

    def drop_sockets(self) -> None:
        """Every socket is lost; the connections may be resumed."""
        self._get("drop")

    def _get(self, what: str, **parameters: str) -> Any:
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(f"{self.url}/test/{what}?{query}", timeout=10) as response:
            return json.load(response)


def start_ably() -> AblyServer:
    """Start the endpoint.

    Raises:
        ServerNotStarted: It did not come up, with the reason.
    """
    return AblyServer()
