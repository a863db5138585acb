"""The parser, and what an error becomes: one sentence on stderr and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any, cast

from cyclopts import App, CycloptsError

from stepwell.errors import InvalidInputError, StepwellError

from ._terminal import CommandError, Terminal, UsageError

__all__ = ["app", "main"]

app = App(
    name="stepwell",
    help="Conversations that run in stages: talk to a flow, look at it, serve it.",
    help_epilogue="Exit codes: 0 done, 1 failed, 2 used wrongly.",
    help_format="plaintext",
    version_flags=["--version"],
    exit_on_error=False,
    print_error=False,
    suppress_keyboard_interrupt=False,
    result_action="return_value",
)

_COMMANDS = {
    "demo": "Book a hotel in the terminal: no key needed, or with a real model.",
    "new": "Create a project with a two-stage flow that passes its own tests.",
    "chat": "Talk to a flow in the terminal.",
    "serve": "Serve flows, and agents on channels, over HTTP.",
    "watch": "Watch a conversation on a channel as it happens.",
    "check": "Find what is wrong with flows before anybody talks to them.",
    "draw": "Draw a flow's stages and the ways between them.",
    "bench": "Measure turns per second on this machine.",
    "sessions": "List, show, export, import and delete stored sessions.",
}

for _order, (_name, _help) in enumerate(_COMMANDS.items()):
    app.command(f"stepwell.cli._{_name}:{_name}", name=_name, help=_help, sort_key=_order)
app["--help"].group = app["--version"].group = "Options"


_OPTIONS = ("/store", "/channels", "/after", "/host", "/port", "/api_keys", "/jwt", "/session_id")
"""Where an `InvalidInputError` is about what was typed on the command line."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Args:
        argv: Arguments after the program's name; the process's by default.

    Returns:
        The exit code: 0 done, 1 failed, 2 used wrongly, 130 interrupted.
    """
    terminal = Terminal()
    debug = os.environ.get("STEPWELL_DEBUG", "") not in ("", "0")
    try:
        return cast("int | None", app(sys.argv[1:] if argv is None else list(argv))) or 0
    except CycloptsError as error:
        terminal.error(_sentence(error), "See stepwell --help, or stepwell COMMAND --help.")
        return 2
    except UsageError as error:
        terminal.error(str(error))
        return 2
    except CommandError as error:
        terminal.error(str(error))
        return 1
    except StepwellError as error:
        if debug:
            raise
        terminal.error(error.message)
        return 2 if isinstance(error, InvalidInputError) and error.pointer in _OPTIONS else 1
    except KeyboardInterrupt:
        terminal.error("Interrupted.")
        return 130
    except BrokenPipeError:
        # Whoever read our output has gone, as `| head` does; nothing more can be said to them.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if debug:
            raise
        terminal.error(f"{type(error).__name__}: {error}", "Set STEPWELL_DEBUG=1 to see where it comes from.")
        return 1


def _sentence(error: CycloptsError) -> str:
    text: Any = error.msg
    error.verbose = False
    return " ".join(str(error if text is None else text).split()).removesuffix(".") + "."
