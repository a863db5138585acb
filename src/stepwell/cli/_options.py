"""Options that several commands have, each with its environment variable."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, TypeAlias

from cyclopts import Parameter

__all__ = ["Channels", "Config", "Debug", "Json", "Models", "Session", "Store", "Target", "without_password"]

DEFAULT_STORE = "sqlite:///stepwell.db"
DEFAULT_CHANNELS = DEFAULT_STORE
"""A store and channels may share a file."""

Target: TypeAlias = Annotated[
    str,
    Parameter(help="A flow: module:Flow, path/to/file.py:Flow, or a package's directory. The class may be left out."),
]
Store: TypeAlias = Annotated[
    str,
    Parameter(
        name="--store",
        env_var="STEPWELL_STORE",
        help="Where sessions are kept: memory://, sqlite:///file.db or postgresql://...",
    ),
]
Channels: TypeAlias = Annotated[
    str,
    Parameter(
        name="--channels",
        env_var="STEPWELL_CHANNELS",
        help="Where conversations are: sqlite:///file.db, postgresql://..., redis://... or ably:KEY.",
    ),
]
Models: TypeAlias = Annotated[
    str,
    Parameter(
        name="--models",
        env_var="STEPWELL_MODELS",
        help="Providers: env (what the environment has keys for, and offline), offline, or module:attribute.",
    ),
]
Session: TypeAlias = Annotated[str | None, Parameter(name="--session", help="Go on with this session.")]
Config: TypeAlias = Annotated[
    str | None, Parameter(name="--config", help="Context of a new session: a JSON object, or @file.json.")
]
Json: TypeAlias = Annotated[bool, Parameter(name="--json", negative="", help="JSON for scripts.")]
Debug: TypeAlias = Annotated[
    bool,
    Parameter(
        name="--debug", env_var="STEPWELL_DEBUG", negative="", help="Write the log to standard error, with tracebacks."
    ),
]
OutputFile: TypeAlias = Annotated[Path | None, Parameter(help="Write to this file instead of standard output.")]


def without_password(url: str) -> str:
    """The URL of a store or of channels as it may be shown: screens are shared, and logs are kept."""
    url = re.sub(r"(?<=://)([^/?#]*?):[^/?#]*@", r"\1:***@", url)
    return re.sub(r"([?&](?:ssl)?password=)[^&#]*", r"\1***", url, flags=re.IGNORECASE)
