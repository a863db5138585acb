"""`stepwell chat`: a conversation in the terminal."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import signal
import sys
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from stepwell.engine import Engine, PendingRequest, Turn, TurnResult
from stepwell.errors import InvalidInputError, StepwellError, UnknownRequestError
from stepwell.flow import Flow
from stepwell.models.providers import Providers

from ._options import DEFAULT_STORE, Config, Debug, Json, Models, Session, Store, Target
from ._pending import asked, pending_in, typed
from ._screen import Screen
from ._terminal import Terminal, UsageError, reconfigure

__all__ = ["Talk", "chat", "read_config", "write_log"]

_HELP = "/quit ends, /session shows the session's id, /help this; anything else is said. Ctrl-C stops a running turn."
_RECENT = 4


def chat(
    target: Target,
    /,
    *,
    session: Session = None,
    config: Config = None,
    store: Store = DEFAULT_STORE,
    models: Models = "env",
    json: Json = False,
    debug: Debug = False,
) -> int:
    """Talk to a flow in the terminal.

    Input may be piped: each line is what the person says in one turn. Lines of the flow's own talk are in `/help`.
    With --json, each turn's result is one line of JSON. Exit code 1 if the last turn failed.
    """
    from ._targets import load_flow, load_providers

    write_log(debug)
    given = read_config(config)
    flow = load_flow(target)
    talk = Talk(flow, load_providers(models), store, session=session, config=given, as_json=json)
    return talk.run()


def read_config(text: str | None) -> dict[str, Any] | None:
    """The JSON object of `--config`.

    Raises:
        UsageError: It is none.
    """
    import msgspec

    if text is None:
        return None
    try:
        content = Path(text[1:]).read_bytes() if text.startswith("@") else text.encode()
        return msgspec.json.decode(content, type=dict[str, Any])
    except OSError as error:
        raise UsageError(f"--config: {text[1:]} cannot be read ({error.strerror}).") from None
    except (msgspec.MsgspecError, UnicodeError):
        raise UsageError('--config takes a JSON object, such as \'{"key": "value"}\', or @file.json.') from None


def write_log(debug: bool) -> None:
    """Send the log to standard error, or nowhere: on a terminal it would stand in the middle of the conversation."""
    logger = logging.getLogger("stepwell")
    if debug:
        logging.basicConfig(format="%(levelname)s %(name)s: %(message)s")
        logger.setLevel(logging.DEBUG)
    elif not logger.handlers:
        logger.addHandler(logging.NullHandler())


@dataclass
class Talk:
    """One conversation between a person and a flow.

    Attributes:
        flow: The flow.
        models: Providers.
        store: URL of the store.
        session: Session to go on with.
        config: Context of a new session.
        as_json: Whether results are printed instead of replies.
        terminal: Where to.
    """

    flow: type[Flow]
    models: Providers
    store: str
    session: str | None = None
    config: dict[str, Any] | None = None
    as_json: bool = False
    terminal: Terminal = field(default_factory=Terminal)

    def __post_init__(self) -> None:
        self._stage = ""
        self._failed = False
        self._pending: Sequence[PendingRequest] = ()  # what the session waits for: the next lines answer it
        # A person types: the prompt belongs to them. Otherwise their lines are repeated, so that one can read along.
        self._typed = sys.stdin.isatty()

    def run(self) -> int:
        """Talk until the input or the session ends.

        Returns:
            The exit code: 1 if the last turn failed.

        Raises:
            StepwellError: The flow, the store or the session cannot be used.
        """
        reconfigure(sys.stdin)
        # The loop runs only while there is work: between turns nothing waits for it, and Ctrl-C belongs to the prompt.
        with asyncio.Runner() as runner:
            engine = runner.run(self._open())
            try:
                self._converse(runner, engine)
            finally:
                runner.run(self._shut(engine))
        return 1 if self._failed else 0

    async def _open(self) -> Engine:
        engine = Engine([self.flow], models=self.models, store=self.store)
        await engine.start()
        try:
            if self.session is not None:
                await self._resume(engine, self.session)
        except StepwellError:
            await self._shut(engine)
            raise
        return engine

    async def _shut(self, engine: Engine) -> None:
        await engine.close()
        await self.models.aclose()

    async def _resume(self, engine: Engine, session: str) -> None:
        """Show where the conversation stands."""
        from ._sessions import conversation

        head = await engine.get_session(session)
        if head["workflow"]["id"] not in engine.definitions:
            raise InvalidInputError(
                f"Session {session} belongs to flow {head['workflow']['id']}, not to {self.flow.id}.", "/session_id"
            )
        self.config = None
        self._pending = pending_in(head)
        self._stage = str(head["workflow"].get("current", ""))
        if self.as_json:
            return
        self.terminal.line(f"Session {session} goes on in {self._stage}.", "dim")
        for speaker, text in (await conversation(engine.store, session))[-_RECENT:]:
            self.terminal.line(f"{speaker} > {text}", "dim")
        self._ask()

    def _converse(self, runner: asyncio.Runner, engine: Engine) -> None:
        if not self.flow.requires_user_message and self.session is None and runner.run(self._turn(engine, None)):
            return
        for text in self._lines():
            if runner.run(self._answer(engine, text) if self._pending else self._turn(engine, text)):
                return

    def _lines(self) -> Iterator[str]:
        """What the person says, turn by turn."""
        while True:
            try:
                line = self._read()
            except (EOFError, KeyboardInterrupt):
                if self._typed:
                    self.terminal.line()
                return
            text = line.strip()
            if text in ("/quit", "/exit"):
                return
            if text == "/help":
                self.terminal.line(_HELP, "dim")
            elif text == "/session":
                self.terminal.line(self.session or "The session begins with the first turn.", "dim")
            elif text:
                yield text

    def _read(self) -> str:
        if self._typed:
            with contextlib.suppress(ImportError):
                importlib.import_module("readline")  # editing and history of what is typed
            # The marks tell readline that the colours take no room.
            return input("\001\033[1;32m\002you >\001\033[0m\002 " if self.terminal.fancy else "")
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        if line.strip() and not self.as_json:
            self.terminal.out.print("you > ", style="bold green", end="")
            self.terminal.line(line.strip())
        return line

    async def _turn(self, engine: Engine, text: str | None) -> bool:
        """One turn; whether the conversation is over with it."""
        try:
            async with engine.stream(self.flow.id, text, session_id=self.session, config=self.config) as turn:
                with _stopped_by_hand(turn):
                    await self._watch(turn)
            result = turn.result
        except InvalidInputError as error:  # such as a line that is too long: nothing happened
            self._fail(error.message)
            return False
        return self._ended(result)

    async def _answer(self, engine: Engine, text: str) -> bool:
        """The answer to the first of what the session waits for; whether the conversation is over with it."""
        request, session = self._pending[0], cast("str", self.session)
        try:
            result = await engine.answer(session, request.id, typed(request, text))
        except UnknownRequestError as error:
            self._fail(error.message)
            result = await engine.recover(session)  # it expired: perhaps nothing is waited for any more
        if not self.as_json and result.message:
            self.terminal.out.print(f"{result.current} > ", style="bold cyan", end="")
            self.terminal.line(result.message)
        return self._ended(result)

    def _ask(self) -> None:
        """Ask for the first of what the session waits for."""
        if self._pending and not self.as_json:
            self.terminal.line(asked(self._pending[0]), "yellow")

    def _ended(self, result: TurnResult) -> bool:
        """What a turn came to; whether the conversation is over with it."""
        self.config = None
        self._pending = result.pending
        self.session = result.session_id or self.session
        self._stage = result.current or self._stage
        self._failed = not result.success
        if self.as_json:
            self.terminal.json(result.to_json(), indent=0)
        elif result.error is not None:
            self._explain(result)
        elif result.status in ("completed", "aborted"):
            self.terminal.line(f"The session is {result.status}.", "dim")
        else:
            self.terminal.line()
        self._ask()
        return result.status in ("completed", "aborted")

    async def _watch(self, turn: Turn) -> None:
        if self.as_json:
            async for _ in turn:
                pass
            return
        with Screen(self.terminal, self._stage) as screen:
            async for event in turn:
                screen.show(event)
            screen.finish(turn.result)

    def _explain(self, result: TurnResult) -> None:
        error = result.error
        assert error is not None
        hint = ""
        if error.code == "handler":
            hint = "Run the command with --debug to see the traceback."
        elif error.retryable:
            hint = "The session is as it was: say it again to try again."
        self._fail(error.message, hint)

    def _fail(self, sentence: str, hint: str = "") -> None:
        self._failed = True
        self.terminal.error(sentence, hint)


@contextlib.contextmanager
def _stopped_by_hand(turn: Turn) -> Generator[None]:
    """Let Ctrl-C cancel the turn and not the command."""
    loop = asyncio.get_running_loop()
    try:
        loop.add_signal_handler(signal.SIGINT, turn.cancel, "user", "Ctrl-C")
    except (NotImplementedError, ValueError, RuntimeError):  # not the main thread, or a system without
        yield
        return
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
