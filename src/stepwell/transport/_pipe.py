"""Moving what a source gives to an encoder, until it ends, fails, or is to stop."""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import anyio
import anyio.lowlevel

from stepwell.errors import SessionClosedError

from ._cancel import CancelEvent
from ._codec import Encoder
from ._writer import ChannelWriter

__all__ = ["OnCancelled", "PipeResult", "Source", "Write", "pump"]

_log = logging.getLogger("stepwell.transport")

Source: TypeAlias = AsyncIterable[Any] | Iterable[Any]
"""Outputs of the codec. Its iterator's `aclose` (or `close`) is called at the end, however it comes."""

Write: TypeAlias = Callable[[Any], Awaitable[None]]
"""Writes one more output."""

OnCancelled: TypeAlias = Callable[[Write], Awaitable[None] | None]
"""Says last words into the open streams of a `pipe` that is cancelled."""

_BREATH: Final = 16
"""Outputs after which the event loop gets its turn, whatever source and encoder do: a source that never waits would
otherwise keep cancels and kept text from being seen."""


@dataclass(frozen=True, slots=True)
class PipeResult:
    """How a `pipe` ended.

    Attributes:
        reason: `complete`: the source came to its end. `cancelled`: the run was cancelled. `error`: the source failed,
            or the channel did.
        error: What failed, as it was raised.
    """

    reason: Literal["complete", "cancelled", "error"]
    error: Exception | None = None


async def pump(
    source: Source, encoder: Encoder, cancelled: CancelEvent, writer: ChannelWriter, on_cancelled: OnCancelled | None
) -> PipeResult:
    """Move everything. Never raises for what source, encoder or channel do: that is in the result.

    Cancelled by the caller: open streams are closed as `cancelled` first, for as long as `ChannelWriter.last_words`
    gives.
    """
    puller = _Puller(source)
    unlisten = cancelled.listen(puller.stop)
    flushing = anyio.CancelScope(shield=True)

    async def flush() -> None:
        with flushing:
            try:
                await encoder.run()
            except Exception as error:  # noqa: BLE001 - the result of the pipe, not of the group
                puller.fail(error)

    result: PipeResult | BaseException | None = None
    try:
        async with anyio.create_task_group() as group:
            group.start_soon(flush)
            try:
                result = await _drive(puller, encoder, writer, on_cancelled)
            except anyio.get_cancelled_exc_class():
                raise
            except BaseException as error:  # noqa: BLE001 - raised below: out of the group it would come wrapped
                result = error
            finally:
                # Only after the encoder was closed, which waits for what `run` is writing: an append cut in two could
                # not be told from one that was not sent.
                flushing.cancel()
    finally:
        unlisten()
        with writer.last_words():
            await puller.close()
    if isinstance(result, PipeResult):
        return result
    assert result is not None
    raise result


async def _drive(
    puller: _Puller, encoder: Encoder, writer: ChannelWriter, on_cancelled: OnCancelled | None
) -> PipeResult:
    try:
        ended = await puller.run(encoder.publish_output)
        if ended:
            await encoder.finish()
        elif writer.stopped is None:
            if on_cancelled is not None:
                said = on_cancelled(encoder.publish_output)
                if inspect.isawaitable(said):
                    await said
            await encoder.cancel_streams()
        await encoder.close()
    except anyio.get_cancelled_exc_class():
        with writer.last_words(), contextlib.suppress(Exception):
            await encoder.cancel_streams()
            await encoder.close()
        raise
    except SessionClosedError as error:
        # Detached meanwhile: nothing may be written any more, and nothing is wrong.
        return PipeResult("cancelled") if error is writer.stopped else PipeResult("error", error)
    except Exception as error:  # noqa: BLE001 - whatever a source raises
        with contextlib.suppress(Exception):
            await encoder.close()
        return PipeResult("error", error)
    return PipeResult("complete" if ended else "cancelled")


class _Puller:
    """Reads a source, and can be stopped while it waits for it: there, and nowhere else, so that no write is cut."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._iterator: AsyncIterator[Any] | Iterator[Any] | None = None
        self._scope = anyio.CancelScope()
        self._reading = False
        self._stopped = False
        self._failure: Exception | None = None

    def stop(self) -> None:
        """Read no further. Reaches a source that is stuck."""
        self._stopped = True
        if self._reading:
            self._scope.cancel()

    def fail(self, error: Exception) -> None:
        """Stop, and raise `error` from `run`."""
        self._failure = error
        self.stop()

    async def run(self, write: Write) -> bool:
        """Write output after output. Whether the source came to its end by itself."""
        count = 0
        read = self._reader()
        ended = False
        with self._scope:
            while not self._stopped:
                if count % _BREATH == 0:
                    await anyio.lowlevel.checkpoint()
                    if self._stopped:
                        break
                count += 1
                self._reading = True
                try:
                    output = await read()
                except StopAsyncIteration:
                    ended = not self._stopped
                    break
                except Exception as error:
                    if not self._stopped:
                        raise
                    _log.debug("A source that was cancelled raised.", exc_info=error)
                    break
                finally:
                    self._reading = False
                if self._stopped:
                    break  # a source that took the cancellation for a reason to give one more
                await write(output)
        if self._failure is not None:
            raise self._failure
        return ended

    def _reader(self) -> Callable[[], Awaitable[Any]]:
        if isinstance(self._source, AsyncIterable):
            self._iterator = many = aiter(self._source)
            return many.__anext__
        self._iterator = some = iter(self._source)
        end = object()

        async def read() -> Any:
            output = next(some, end)
            if output is end:
                raise StopAsyncIteration
            return output

        return read

    async def close(self) -> None:
        """Let the source release what it holds."""
        close = getattr(self._iterator, "aclose", None) or getattr(self._iterator, "close", None)
        if close is None:
            return
        try:
            closing = close()
            if inspect.isawaitable(closing):
                await closing
        except Exception as error:  # noqa: BLE001 - the outputs are written; how the source ends is its own matter
            _log.debug("A source raised when it was closed.", exc_info=error)
