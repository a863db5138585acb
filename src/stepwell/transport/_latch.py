"""A result that several may wait for, before and after it is there."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Generic, TypeVar

import anyio

__all__ = ["Latch"]

T = TypeVar("T")


class Latch(Generic[T]):
    """Awaitable any number of times, by any number of tasks. Cancelling one who waits concerns nobody else."""

    __slots__ = ("_error", "_set", "_value")

    def __init__(self) -> None:
        self._set = anyio.Event()
        self._value: T | None = None
        self._error: Exception | None = None

    @property
    def done(self) -> bool:
        """Whether there is a result or an error."""
        return self._set.is_set()

    def resolve(self, value: T) -> None:
        """Give the result. Only the first result or error counts."""
        if not self.done:
            self._value = value
            self._set.set()

    def fail(self, error: Exception) -> None:
        """Give an error, raised in all who wait. Only the first result or error counts."""
        if not self.done:
            self._error = error
            self._set.set()

    def __await__(self) -> Generator[Any, Any, T]:
        """Wait for the result."""
        return self._wait().__await__()

    async def _wait(self) -> T:
        await self._set.wait()
        if self._error is not None:
            raise self._error
        return self._value  # pyright: ignore[reportReturnType] - resolved, or it would not be set
