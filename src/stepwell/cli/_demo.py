"""`stepwell demo`: the hotel example in the terminal, with whatever model there is."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.markup import escape

from ._chat import Talk, write_log
from ._options import DEFAULT_STORE, Debug, Json, Session, Store, without_password
from ._terminal import CommandError, Terminal, UsageError

if TYPE_CHECKING:
    from stepwell.flow import Flow
    from stepwell.models.providers import Providers

__all__ = ["demo"]

OFFLINE = "offline:rules"
DEFAULTS = {"openai": "gpt-5.1", "anthropic": "claude-haiku-4-5", "google": "gemini-2.5-flash"}
"""The model of each provider that the demo takes, unless told otherwise."""

VARIABLES = {"openai": "OPENAI_MODEL", "anthropic": "ANTHROPIC_MODEL", "google": "GEMINI_MODEL"}

Model = Annotated[
    str | None,
    Parameter(name="--model", env_var="STEPWELL_MODEL", help="Talk to this one, as provider:name; offline:rules too."),
]


def demo(
    *,
    model: Model = None,
    session: Session = None,
    store: Store = DEFAULT_STORE,
    json: Json = False,
    debug: Debug = False,
) -> int:
    """Book a hotel in the terminal: no key needed, or with a real model.

    The model is the first that the environment has: OPENAI_API_KEY or OPENAI_BASE_URL, ANTHROPIC_API_KEY,
    GEMINI_API_KEY (with OPENAI_MODEL, ANTHROPIC_MODEL, GEMINI_MODEL for its name), else a bundled offline model that
    works by rules. Input may be piped: each line is what the person says in one turn.
    """
    write_log(debug)
    terminal = Terminal()
    flow = _hotel()
    providers, chosen = choose(model, os.environ, slow=terminal.fancy)
    if not json:
        _banner(terminal, chosen, store, session)
    if chosen != OFFLINE:
        with terminal.err.status(f"Loading {chosen} ..."):
            providers.preload(chosen)
    talk = Talk(flow, providers, store, session=session, config={"model": chosen}, as_json=json, terminal=terminal)
    code = talk.run()
    if talk.session and not json and not store.startswith("memory:"):
        option = "" if store == DEFAULT_STORE else f" --store {without_password(store)}"
        terminal.line(f"Session {talk.session}. Look at it: stepwell sessions show {talk.session}{option}", "dim")
    return code


def choose(model: str | None, env: Mapping[str, str], *, slow: bool = False) -> tuple[Providers, str]:
    """The providers of an environment, and the model to talk to.

    Args:
        model: What the person asked for.
        env: The environment.
        slow: Whether the offline model lets words come one by one, as a real one does.

    Raises:
        UsageError: The model is not usable here.
        LlmSetupError: The environment is wrong.
    """
    from stepwell.errors import LlmSetupError
    from stepwell.models.offline import OfflineModel
    from stepwell.models.providers import Providers

    providers = Providers.from_env(env)
    providers.register(OfflineModel.name, OfflineModel(word_delay=0.02 if slow else 0.0))
    if model is not None:
        try:
            providers.validate(model)
        except LlmSetupError as error:
            raise UsageError(f"--model: {error.message}") from None
        return providers, model
    for provider, variable in VARIABLES.items():
        if provider not in providers:
            continue
        name = env.get(variable, "").strip()
        if not name and provider == "openai" and (url := env.get("OPENAI_BASE_URL", "").strip()):
            name = _served(url, env.get("OPENAI_API_KEY", "").strip())
        chosen = f"{provider}:{name or DEFAULTS[provider]}"
        providers.validate(chosen)
        return providers, chosen
    return providers, OFFLINE


def _served(url: str, key: str) -> str:
    """The first model that an OpenAI-compatible server lists; `""` if it does not say."""
    import urllib.request

    import msgspec

    request = urllib.request.Request(f"{url.rstrip('/')}/models")  # noqa: S310 - from_env checked the scheme
    if key:
        request.add_header("Authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=5) as response:  # noqa: S310
            listed: Any = msgspec.json.decode(response.read(1_000_000))
        return str(listed["data"][0]["id"])
    except (OSError, ValueError, msgspec.MsgspecError, LookupError, TypeError):
        return ""


def _hotel() -> type[Flow]:
    """The flow: bundled in the wheel, or in the checkout that this package is run from."""
    import stepwell

    from ._targets import load_flow

    package = Path(stepwell.__file__).parent
    for place in (package / "_demo" / "hotel", package.parents[1] / "examples" / "hotel" / "hotel"):
        if place.is_dir():
            return load_flow(str(place))
    raise CommandError("The demo's flow is not installed: install Stepwell from its wheel, or run it in a checkout.")


def _banner(terminal: Terminal, chosen: str, store: str, session: str | None) -> None:
    lines = ["[bold]A hotel reservation in four stages:[/] explore, present, compare, book.", ""]
    if chosen == OFFLINE:
        lines += [
            "You talk to a [bold]rule-based offline model[/]: no weights, no network, no key.",
            "It understands simple English about this trip and is no language model.",
            "To talk to a real one, set one of these and run the same command:",
            "",
            "  [cyan]OPENAI_API_KEY[/]   [cyan]ANTHROPIC_API_KEY[/]   [cyan]GEMINI_API_KEY[/]",
            "  [cyan]OPENAI_BASE_URL[/] (and OPENAI_MODEL), for any server with OpenAI's interface",
        ]
    else:
        lines += [f"You talk to [bold]{escape(chosen)}[/]; --model {OFFLINE} takes the bundled rules instead."]
    lines += ["", f"Every step is saved, in [cyan]{escape(without_password(store))}[/], before the next one begins."]
    if session is None:
        lines += ['Say for example: [bold]"Hello, I\'d like a few days in Lisbon"[/]. /quit ends.']
    if terminal.out.is_terminal:
        from rich.panel import Panel

        terminal.out.print(Panel("\n".join(lines), title="[bold]Stepwell[/]", border_style="cyan", expand=False))
    else:
        from rich.text import Text

        for line in ["Stepwell", *lines]:
            terminal.line(Text.from_markup(line).plain)
    terminal.line()
    sys.stdout.flush()
